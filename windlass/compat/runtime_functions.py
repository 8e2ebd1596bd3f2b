"""Functions of `deepspeed.runtime.utils`: device transfers of nested tensors, seeds, and memory reports."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist

from windlass.base.atomic_file import make_directory
from windlass.compat.accelerator.real_accelerator import get_accelerator
from windlass.observe import memory_usage

Item = TypeVar("Item")
TensorPredicate = Callable[[Any], bool]
noop_context = nullcontext
_GIB = 1 << 30


def copy_to_device(item: Any, device: Any, criterion_func: TensorPredicate) -> Any:
    """Return nested lists, tuples and dicts with every item that meets the criterion copied to `device`."""
    if criterion_func(item):
        return item.to(device)
    return _map_children(item, lambda one: copy_to_device(one, device, criterion_func), lambda one: one)


def move_to_device(item: Any, device: Any, criterion_func: TensorPredicate | None = None) -> Any:
    """Return `item`, in which tensors in nested lists, tuples and dicts are moved to `device`.

    With a criterion, only tensors that meet it are moved, in place. Without a criterion, each object that has a method
    `to` is replaced by `to(device)`.
    """
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    move = (lambda one: one.to(device)) if criterion_func is None else (lambda one: one)
    return _map_children(item, lambda one: move_to_device(one, device, criterion_func), move)


def _map_children(item: Any, inner: Callable[[Any], Any], leaf: Callable[[Any], Any]) -> Any:
    if isinstance(item, list):
        return [inner(one) for one in item]
    if isinstance(item, tuple):
        return tuple(inner(one) for one in item)
    if isinstance(item, dict):
        return {key: inner(one) for key, one in item.items()}
    return leaf(item) if hasattr(item, "to") else item


def get_tensor_bytes(item: Any) -> int:
    """Return the total size in bytes of all tensors in nested lists, tuples and dicts."""
    if isinstance(item, torch.Tensor):
        return item.nbytes
    if isinstance(item, list | tuple):
        return sum(map(get_tensor_bytes, item))
    return sum(map(get_tensor_bytes, item.values())) if isinstance(item, dict) else 0


def compare_tensors_in_structures(inputs1: Any, inputs2: Any) -> bool:
    """Return True if two nested lists or dicts are equal, comparing tensors by value."""
    if isinstance(inputs1, torch.Tensor):
        return isinstance(inputs2, torch.Tensor) and torch.equal(inputs1, inputs2.to(inputs1.device))
    if type(inputs1) is not type(inputs2):
        return False
    if isinstance(inputs1, dict):
        same = inputs1.keys() == inputs2.keys()
        return same and all(compare_tensors_in_structures(inputs1[key], inputs2[key]) for key in inputs1)
    if isinstance(inputs1, list | tuple):
        return len(inputs1) == len(inputs2) and all(map(compare_tensors_in_structures, inputs1, inputs2))
    return bool(inputs1 == inputs2)


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy and torch. NumPy gets the lower 32 bits."""
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    torch.manual_seed(seed % (1 << 63))


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log `message` and the memory use of device and host on rank 0, and reset peaks. Does nothing without `force`."""
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    gc.collect()
    memory_usage.see_memory_usage(message)
    get_accelerator().reset_peak_memory_stats()


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Print the device's memory use on rank `print_rank`; -1 means all ranks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if print_rank not in (-1, rank):
        return
    device = get_accelerator()
    device.synchronize()
    if reset_max:
        device.reset_peak_memory_stats()
    print(
        f"RANK={rank} MEMSTATS {msg} device={device.current_device_name()} "
        f"current alloc={device.memory_allocated() / _GIB:.4f}GB max={device.max_memory_allocated() / _GIB:.4f}GB "
        f"current cache={device.memory_cached() / _GIB:.4f}GB max={device.max_memory_cached() / _GIB:.4f}GB"
    )


def get_ma_status() -> int:
    """Return the bytes allocated on the device on rank 0; 0 on other ranks."""
    return 0 if dist.is_initialized() and dist.get_rank() != 0 else get_accelerator().memory_allocated()


def empty_cache() -> None:
    """Free the unused memory of torch's allocator, and reset peak statistics."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def torch_memory_reserved(device_index: int | None = None) -> int:
    """Return the bytes reserved by torch's allocator."""
    return get_accelerator().memory_reserved(device_index)


def torch_max_memory_reserved(device_index: int | None = None) -> int:
    """Return the peak of the bytes reserved by torch's allocator."""
    return get_accelerator().max_memory_reserved(device_index)


def noop_decorator(func: Item) -> Item:
    """Return `func` unchanged."""
    return func


def ensure_directory_exists(filename: str) -> None:
    """Create the parent folder of a file."""
    make_directory(Path(filename).parent)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Format a call as source code."""
    parts = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    return f"{base}({', '.join(parts)})"


def get_only_unique_item(items: Collection[Item]) -> Item:
    """Return the single distinct item of a collection.

    Raises:
        RuntimeError: there are several distinct items, or none.
    """
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(f"expected exactly one distinct item, got {found or 'none'}")
    return found.pop()


def get_inactive_params(param_list: Iterable[Any]) -> list[Any]:
    """Return the parameters that are sharded at the moment."""
    from windlass.zero.core.sharded_parameter import ShardedParameter

    return [param for param in param_list if isinstance(param, ShardedParameter)]


def align_dense_tensors(tensor_list: Sequence[torch.Tensor], alignment: int) -> list[torch.Tensor]:
    """Return the tensors, plus a tensor of zeros that pads their total size to a multiple of `alignment`."""
    missing = -sum(tensor.numel() for tensor in tensor_list) % alignment
    return [*tensor_list, *([tensor_list[0].new_zeros(missing)] if missing else [])]


def maybe_loss_for_backward(value: Any) -> bool:
    """Return True if a value may be a loss: a tensor of one element that requires grad."""
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad


class DummyOptim:
    """Placeholder for an optimizer, with one parameter group."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]
