"""Smaller models: rounding of trained ones, packed directories, compression during training.

Reading order: quantization_config (the entry of `config.json`), model_directory (tensors of a directory),
partial_directory (a directory that is being written), packed_directory (writes one), packed_model (loads one),
integer_grid, gptq, input_scales, rotation (methods of rounding), block_calibration, post_training (one block after the
other), layer_distillation (learned rounding), calibration_text, fake_rounding, sharded_weight, compressed_layers,
fused_encoders, format_rounding, snip_pruning, compression_training, block_curvature, quantize_training,
redundancy_clean, layer_reduction, distillation_losses, teacher_cache, distillation, engine_steps (during training),
rounded_model, lora (QLoRA), gptq_awq (checkpoints of GPTQ and AWQ), gguf_blocks, gguf_file,
gguf_model (GGUF).
"""
