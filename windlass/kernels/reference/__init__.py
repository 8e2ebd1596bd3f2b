"""Reference implementation of every kernel in plain PyTorch, which also runs where native code is missing.

Reading order: fused_multiply_add (with square roots), stochastic_rounding, blockwise (8-bit codes);
reference_update (optimizer rules, from stored tensors to fp32 and back); keyed_sum (a hash), crc32c (checksums of
pages); quantized_input (rounded inputs of linear layers), quantized_rows (int8 KV cache), paged_attention.
"""

from __future__ import annotations

from windlass.kernels.reference.blockwise import dequantize_blockwise as dequantize_blockwise
from windlass.kernels.reference.blockwise import quantize_blockwise as quantize_blockwise
from windlass.kernels.reference.crc32c import crc32c as crc32c
from windlass.kernels.reference.keyed_sum import keyed_sum as keyed_sum
from windlass.kernels.reference.reference_update import update_with_reference as update_with_reference
