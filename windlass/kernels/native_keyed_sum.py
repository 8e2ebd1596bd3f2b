"""Keyed sums of memory (checksums, see `reference.keyed_sum`), by native code if it is available."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch

from windlass.base.errors import ModelError
from windlass.base.native_memory import freed_storage_problem, has_memory
from windlass.kernels import reference
from windlass.kernels.kernel_dispatch import get_active_kernel_path

_INTEGER_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64)
_MASK = (1 << 64) - 1


def keyed_sum(words: torch.Tensor, start: int, seed: int) -> torch.Tensor:
    """Compute `reference.keyed_sum` bit for bit, for contiguous words on the CPU in one pass over memory.

    Raises:
        ModelError: `words` has another dtype or its storage was freed, or `start` is negative.
    """
    total = _native_sum(words, start, seed)
    if total is None:
        return reference.keyed_sum(words, start, seed)
    return torch.tensor(total - (1 << 64) if total >> 63 else total, dtype=torch.int64)


def keyed_sum_on_host(words: torch.Tensor, start: int, seed: int) -> int:
    """Compute `keyed_sum` modulo 2^64 as a Python number.

    For thousands of small CPU tensors, additions of result tensors would take longer than the sums themselves.
    """
    total = _native_sum(words, start, seed)
    return int(reference.keyed_sum(words, start, seed)) & _MASK if total is None else total


def _native_sum(words: torch.Tensor, start: int, seed: int) -> int | None:
    """Compute the sum by native code, in `[0, 2^64)`. Return None if native code is missing or does not support the
    words."""
    if words.dtype not in _INTEGER_DTYPES:
        raise ModelError(f"words to be hashed are {words.dtype}; pass int8, int16, int32 or int64, such as .view(...)")
    if start < 0:
        raise ModelError(f"words to be hashed begin at {start}; begin at 0 or later")
    if words.device.type == "cpu" and words.is_contiguous() and not has_memory(words):
        raise ModelError(f"the tensor of words to be hashed {freed_storage_problem(words)}")
    module = _native_module() if get_active_kernel_path().is_native else None
    if module is None or words.device.type != "cpu" or not words.is_contiguous():
        return None
    threads = torch.get_num_threads()
    return int(module.keyed_sum(words.data_ptr(), words.element_size(), words.numel(), start, seed & _MASK, threads))


@cache
def _native_module() -> ModuleType | None:
    try:
        return importlib.import_module("windlass.kernels._hashes")
    except ImportError:  # the reason is logged for the optimizers' kernels, which are built together with this module
        return None
