"""Kernels in C++ with their meaning in PyTorch beside them. In reading order:

rules (the numbers of an update), piece (the tensors of one), reference (what every kernel has to compute), dispatch
(which path runs, and why), keyed_sum (a hash of memory); native/ holds the C++ sources.
"""

from __future__ import annotations

from windlass.kernels.kernel_dispatch import apply_updates as apply_updates
from windlass.kernels.kernel_dispatch import get_active_kernel_path as get_active_kernel_path
from windlass.kernels.native_keyed_sum import keyed_sum as keyed_sum
from windlass.kernels.native_keyed_sum import keyed_sum_on_host as keyed_sum_on_host
from windlass.kernels.update_tensors import UpdateTensors as UpdateTensors
