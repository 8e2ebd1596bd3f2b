"""C++ and Triton kernels, with reference implementations in PyTorch.

Start with: update_rules, update_tensors (coefficients and tensors of an optimizer update), reference (specification of
the kernels), kernel_dispatch (choice of the path), native_keyed_sum (hash of memory); weight_format, packed_linear
(packed weights in training); inference_path, panel_memory, packed_gemm, paged_attention, fused_layers,
token_sampling (inference on the CPU); device_matmul, device_attention (inference on an accelerator). native/ has the
C++ sources.
"""

from __future__ import annotations

from windlass.kernels.kernel_dispatch import apply_updates as apply_updates
from windlass.kernels.kernel_dispatch import get_active_kernel_path as get_active_kernel_path
from windlass.kernels.native_keyed_sum import keyed_sum as keyed_sum
from windlass.kernels.native_keyed_sum import keyed_sum_on_host as keyed_sum_on_host
from windlass.kernels.update_tensors import UpdateTensors as UpdateTensors
