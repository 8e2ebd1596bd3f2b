"""Smaller models: directories of packed weights, written layer by layer, and the files of other libraries.

In reading order: quantization_config (the entry of `config.json`), model_directory (tensors of a directory),
packed_directory (writes one), packed_model (loads one), gptq_awq (checkpoints of GPTQ and AWQ), gguf_blocks,
gguf_file (GGUF).
"""
