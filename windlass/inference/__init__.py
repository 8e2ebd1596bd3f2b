"""Inference: continuous batching of any causal language model with a paged KV cache.

Reading order: sampling_params, outputs (the interface); block_manager, step_cost, scheduler (which tokens run);
step_batch, paged_backend, paged_runner, own_cache_runner, lora_files, lora (the forward); sampler, detokenizer,
structured_output, speculation (the next token); llm_engine (one step); llm, async_engine (its faces).
Several ranks: rank_channel, step_message, parallel_model, tensor_parallel_runner, tensor_parallel_worker, worker_loop.
transformers' interface: transformers_generate, inference_model.
"""
