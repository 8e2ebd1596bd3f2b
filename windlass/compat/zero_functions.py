"""`deepspeed.runtime.zero.utils`: the error that scripts catch, and small questions about values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class ZeRORuntimeException(Exception):
    """What DeepSpeed raises where ZeRO cannot do what was asked; windlass raises its own errors, which say why."""


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    """Whether it can be sharded: any of torch's kind can."""
    return isinstance(optimizer, torch.optim.Optimizer)


def is_builtin_type(obj: Any) -> bool:
    """Whether its class is one of Python's own."""
    return type(obj).__module__ in ("builtins", "__builtin__")


def isinstance_namedtuple(obj: object) -> bool:
    """Whether it is a tuple with named fields."""
    return isinstance(obj, tuple) and hasattr(obj, "_asdict") and hasattr(obj, "_fields")


def apply_to_tensors_only(function: Callable[[Any], Any], value: Any, warning_msg_fn: Any = None) -> Any:
    """`value`, with `function` of each tensor in nested tuples, lists and dicts; a `Parameter` stays as it is."""
    if isinstance(value, torch.Tensor):
        return value if isinstance(value, torch.nn.Parameter) else function(value)
    if isinstance(value, dict):
        made = {key: apply_to_tensors_only(function, one) for key, one in value.items()}
        return type(value)(made) if type(value) is not dict else made
    if isinstance(value, (list, tuple)):
        items = [apply_to_tensors_only(function, one) for one in value]
        return type(value)(*items) if isinstance_namedtuple(value) else type(value)(items)
    return value


def get_lst_from_rank0(lst: list[int]) -> list[int]:
    """Rank 0's list, on every rank. Collective."""
    told = [lst]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(told, src=0)
    return told[0]
