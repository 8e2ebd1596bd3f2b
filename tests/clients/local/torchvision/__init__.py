"""Stand-in for torchvision, which has no build for every version of torch: random pictures and a small network.

The scripts were written for GPUs. On a machine without one, `torch.cuda.set_device` and `torch.cuda.synchronize` do
nothing, and `torch.device("cuda", rank)` is the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from torchvision import datasets, models, transforms, utils

__all__ = ["datasets", "models", "transforms", "utils"]


class _Devices(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _DEVICE)


class _Device(metaclass=_Devices):
    def __new__(cls, name: Any, index: int | None = None) -> Any:
        if index is None:
            return _DEVICE(name)  # torch itself calls this class with one argument
        return _DEVICE("cpu") if name == "cuda" else _DEVICE(name, index)


_DEVICE = torch.device
if not torch.cuda.is_available():
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.device = _Device

torch.manual_seed(3)  # not every script sets a seed
