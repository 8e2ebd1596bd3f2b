"""Inference: continuous batching of any causal language model with a paged KV cache.

Reading order: sampling_params, outputs (the interface); block_manager, step_cost, scheduler (which tokens run);
step_batch, paged_backend, decode_graphs, lora_files, lora, paged_runner, own_cache_runner (the forward); token_draw,
sampler, detokenizer, structured_output, speculation (the next token); request_factory, sequence_table, step_planner,
answer_writer, llm_engine (one step); llm, async_engine (the interfaces).
Several ranks: rank_channel, step_message, stage_link, staged_loading, parallel_model, sharded_runner, rank_worker,
worker_loop.
transformers' interface: transformers_generate, inference_model.
"""
