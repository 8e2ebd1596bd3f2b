"""Module `deepspeed.runtime.zero.utils`: an exception that scripts catch, and functions on nested values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class ZeRORuntimeException(Exception):
    """Exception that DeepSpeed raises for unsupported uses of ZeRO. windlass raises its own errors instead."""


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    """Return True for every torch optimizer: windlass can shard them all."""
    return isinstance(optimizer, torch.optim.Optimizer)


def is_builtin_type(obj: Any) -> bool:
    """Return True if the object's class is a Python builtin."""
    return type(obj).__module__ in ("builtins", "__builtin__")


def isinstance_namedtuple(obj: object) -> bool:
    """Return True for a named tuple."""
    return isinstance(obj, tuple) and hasattr(obj, "_asdict") and hasattr(obj, "_fields")


def apply_to_tensors_only(function: Callable[[Any], Any], value: Any, warning_msg_fn: Any = None) -> Any:
    """Apply `function` to each tensor, also to parameters, in nested tuples, lists and dicts. Dicts are changed in
    place."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        for key, one in value.items():
            value[key] = apply_to_tensors_only(function, one)
        return value
    if isinstance(value, (list, tuple)):
        items = [apply_to_tensors_only(function, one) for one in value]
        return type(value)(*items) if isinstance_namedtuple(value) else type(value)(items)
    return value


def get_lst_from_rank0(lst: list[int]) -> list[int]:
    """Return rank 0's list on every rank. Collective."""
    values = [lst]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]
