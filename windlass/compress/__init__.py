"""Compression of models: rounding and packing of weights, pruning, low-rank factors, distillation and merging.

Reading order: quantization_config (the entry of `config.json`), model_directory (tensors of a directory),
checkpoint_names, conv1d_layers, linear_directory, partial_directory (a directory that is being written),
packed_directory (writes a packed model), packed_model (loads a packed model), save_refusal, rounded_model,
weight_quantization (packing at load);
integer_grid, gptq, input_scales, rotation (methods of rounding), calibration_text, block_calibration, sparse_pruning,
post_training (rounding block after block), layer_distillation (learned rounding);
compression_budget, format_speed, token_times, layer_sensitivity, format_choice, budget_choice, compression_workspace
(a format for each layer under a budget);
pruning_units, transformer_units, channel_units, unit_importance, pruned_config, low_rank_config, low_rank,
layer_importance, prune_model, prune_directory (smaller models);
fake_rounding, sharded_weight, compressed_layers, fused_encoders, format_rounding, snip_pruning, layer_reduction,
compression_training, block_curvature, quantize_training, redundancy_clean, distillation_losses, teacher_cache,
distillation, engine_steps (during training);
merge_models, merge_configurations, merge_directories (merging); lora (QLoRA); gptq_awq (checkpoints of GPTQ and AWQ);
gguf_blocks, gguf_file, gguf_model, unpacked_gguf (GGUF).
"""
