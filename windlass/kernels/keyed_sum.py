"""Sums of keyed words, by native code where it is at hand."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch

from windlass.kernels import reference
from windlass.kernels.dispatch import path_in_use


def keyed_sum(words: torch.Tensor, start: int, seed: int) -> torch.Tensor:
    """As `reference.keyed_sum`, bit for bit, in one pass over memory for contiguous words on the CPU."""
    module = _module() if path_in_use().native else None
    if module is None or words.device.type != "cpu" or not words.is_contiguous():
        return reference.keyed_sum(words, start, seed)
    threads = torch.get_num_threads()
    total = module.keyed_sum(
        words.data_ptr(), words.element_size(), words.numel(), start, seed & ((1 << 64) - 1), threads
    )
    return torch.tensor(total - (1 << 64) if total >> 63 else total, dtype=torch.int64)


@cache
def _module() -> ModuleType | None:
    try:
        return importlib.import_module("windlass.kernels._hashes")
    except ImportError:  # why is said of the optimizers' kernels, which come with it
        return None
