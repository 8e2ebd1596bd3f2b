"""Computing a part of a forward again in the backward, instead of keeping what it saves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.graph import saved_tensors_hooks

from windlass.attention.active_backend import get_backend_stack, restore_backends
from windlass.parallel.checkpoint_profiler import CheckpointProfiler
from windlass.parallel.rng_tracker import rng_tracker
from windlass.parallel.saved_tensor_offload import SavedTensorOffloader


@dataclass(frozen=True)
class RecomputeSettings:
    """How calls are checkpointed. `keeper` None: their inputs stay where they are."""

    offloader: SavedTensorOffloader | None
    profiler: CheckpointProfiler


class _CheckpointDepth(threading.local):
    """How many checkpointed calls this thread is inside of."""

    value = 0


_depth = _CheckpointDepth()


def is_inside_checkpoint() -> bool:
    """Whether a checkpointed call runs in this thread: what it saves is dropped, and so is not worth moving."""
    return _depth.value > 0


def recompute(
    settings: RecomputeSettings, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`function(*args, **kwargs)`, of which only the inputs are kept for the backward.

    torch's non-reentrant checkpointing does it. It is handed all tensors, also those inside tuples, lists, dicts and
    `functools.partial`, since what it does not see stays on the device.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():
        return torch.utils.checkpoint.checkpoint(partial(function, **kwargs), *args, use_reentrant=False)
    while isinstance(function, partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    keeper = None if is_inside_checkpoint() else settings.offloader
    tensors: dict[int, torch.Tensor] = {}
    call = _ReplayableCall(settings, function, args, kwargs, tensors)
    hooks: AbstractContextManager[Any] = nullcontext()
    if keeper is not None:
        keeper.begin_call(tensors.values())
        hooks = saved_tensors_hooks(keeper.pack, keeper.unpack)
    inputs = list(tensors.values())
    del args, kwargs, tensors
    with hooks:  # around the call torch puts hooks of its own, so that these see its inputs only
        return torch.utils.checkpoint.checkpoint(call, *inputs, use_reentrant=False)


@dataclass(frozen=True)
class _TensorRef:
    """Where a tensor stood among the arguments."""

    index: int


class _ReplayableCall:
    """The function and its arguments without their tensors, which come as arguments of their own.

    The first call gets what the caller passed, containers included, for the function may change them; a later one
    gets them as they were before it.
    """

    def __init__(
        self,
        settings: RecomputeSettings,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: dict[int, torch.Tensor],
    ) -> None:
        def take(tensor: torch.Tensor) -> _TensorRef:
            tensors.setdefault(id(tensor), tensor)
            return _TensorRef(list(tensors).index(id(tensor)))

        self._settings, self._function = settings, function
        self._first_arguments: tuple[Any, Any] | None = (args, kwargs)
        self._args, self._kwargs = _map_instances(args, torch.Tensor, take), _map_instances(kwargs, torch.Tensor, take)
        self._rng_states = rng_tracker.get_states()
        self._attention_backends = get_backend_stack()

    def __call__(self, *tensors: torch.Tensor) -> Any:
        again, given = self._first_arguments is None, self._first_arguments
        self._first_arguments = None
        args, kwargs = given or (self._fill_tensors(self._args, tensors), self._fill_tensors(self._kwargs, tensors))
        del given
        counts = None if self._settings.offloader is None else self._settings.offloader.counters
        winding = rng_tracker.restored_states(self._rng_states) if again else nullcontext()
        _depth.value += 1
        try:
            with (
                winding,
                restore_backends(self._attention_backends),  # the recomputation runs outside of `use_backend`
                self._settings.profiler.call(recomputing=again, counters=counts),
            ):
                return self._function(*args, **kwargs)
        finally:
            _depth.value -= 1

    @staticmethod
    def _fill_tensors(value: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
        return _map_instances(value, _TensorRef, lambda hole: tensors[hole.index])


def _map_instances(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """`value` with each object of `kind` changed; containers are made anew, other objects stay what they are."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, tuple):
        items = [_map_instances(item, kind, function) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is list:
        return [_map_instances(item, kind, function) for item in value]
    if type(value) is dict:
        return {key: _map_instances(item, kind, function) for key, item in value.items()}
    return value
