"""Inference: continuous batching of any causal language model with a paged KV cache.

Reading order: sampling_params, outputs (the interface); block_manager, step_cost, scheduler (which tokens run);
step_batch, paged_backend, paged_runner, own_cache_runner (the forward); sampler, detokenizer, structured_output,
speculation (the next token); llm_engine (one step); llm, async_engine (its faces).
"""
