"""Inference: continuous batching of any causal language model, with a paged KV cache if the model allows it.

Reading order:

1. Interface: lora_request, sampling_params, outputs, vllm_options, engine_options, llm, async_engine, worker_loop.
2. Choice of the tokens to compute: block_manager, step_cost, scheduler, generation_request, request_factory,
   preempted_blocks, sequence_table, step_planner.
3. Forward of a step: step_batch, model_forward, row_positions, paged_backend, cache_population, decode_graphs,
   lora_files, lora_shards, lora, packed_modules, widened_products, paged_runner, own_cache_runner.
4. Recorded forward: step_recording, step_fusion, step_program.
5. Next token: token_draw, sampler, detokenizer, structured_output, speculation, draft_model, answer_writer.
6. One step, and its uses: llm_engine, beam_search, embeddings, chat_template, token_bound.
7. Weights in a file: weight_file, weight_stream, mapped_loading, streamed_modules, streamed_loading.
8. Several ranks: step_message, rank_channel, stage_link, staged_loading, parallel_model, sharded_lora, sharded_runner,
   rank_worker.
9. Loading of a model, and assembly of its engine: model_loading, runner_factory, engine_factory.
10. Interface of transformers: transformers_generate, inference_model.
"""
