"""Recomputation of a part of the forward in the backward, instead of saving its activations."""

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
    """Settings of checkpointed calls. With `offloader` None, saved inputs stay on the device."""

    offloader: SavedTensorOffloader | None
    profiler: CheckpointProfiler


class _CheckpointDepth(threading.local):
    """Nesting depth of checkpointed calls in this thread."""

    value = 0


_depth = _CheckpointDepth()


def is_inside_checkpoint() -> bool:
    """Return True inside a checkpointed call. Tensors saved there are dropped at once, so offloading them has no
    use."""
    return _depth.value > 0


def recompute(
    settings: RecomputeSettings, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `function(*args, **kwargs)` and, if gradients are enabled, save only its inputs for the backward.

    torch's non-reentrant checkpointing does the work. It receives all tensors as direct arguments, including tensors
    inside tuples, lists, dicts and `functools.partial`, because the saved-tensor hooks are called only for direct
    arguments; other tensors would stay on the device.
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
    with hooks:  # torch adds hooks of its own around the call, so these hooks receive only its inputs
        return torch.utils.checkpoint.checkpoint(call, *inputs, use_reentrant=False)


@dataclass(frozen=True)
class _TensorRef:
    """Index of a tensor among the tensor arguments."""

    index: int


class _ReplayableCall:
    """Function and its arguments, with the tensors taken out and passed separately.

    The first call uses the caller's own argument objects, including containers, because the function may modify them.
    Later calls use containers rebuilt from their state before the first call.
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
                # TorchScript's first runs save other tensors for the backward than its later, optimized ones, and
                # torch refuses a recomputation that saves other tensors than the forward.
                torch.jit.optimized_execution(False),  # type: ignore[attr-defined]
                self._settings.profiler.call(recomputing=again, counters=counts),
            ):
                return self._function(*args, **kwargs)
        except RuntimeError as error:
            if again and _is_stop_inside_script(error):
                return None
            raise
        finally:
            _depth.value -= 1

    @staticmethod
    def _fill_tensors(value: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
        return _map_instances(value, _TensorRef, lambda hole: tensors[hole.index])


def _is_stop_inside_script(error: RuntimeError) -> bool:
    """Return True if torch ended a recomputation early inside of a TorchScript function.

    torch raises an exception without a text once the last saved tensor is recomputed. TorchScript's interpreter turns
    this exception into a RuntimeError. torch itself checks afterwards that every tensor was computed again.
    """
    text = str(error)
    return "TorchScript interpreter" in text and text.rstrip().endswith("RuntimeError:")


def _map_instances(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Return `value` with `function` applied to each instance of `kind`, also in tuples, lists and dicts, which are
    rebuilt. Other objects are returned unchanged.
    """
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
