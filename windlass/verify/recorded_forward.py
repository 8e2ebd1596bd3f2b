"""Record of one forward of the sharded model, complete enough for a plain copy to replay it."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.errors import ModelError
from windlass.base.tensor_tree import iterate_tensors
from windlass.verify.module_trace import TraceEvent

_COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "barrier", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "gather", "gather_object"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "scatter", "broadcast_object_list"),
    *("all_to_all", "all_to_all_single"),
)


@dataclass
class RecordedForward:
    """Forward, and the gradients of its outputs.

    Attributes:
        args: positional arguments, with tensors on the CPU and without graph.
        kwargs: keyword arguments, in the same form.
        on_device: for each tensor of the arguments, in the order of `iterate_tensors`, True if it was on the device.
        rng_states: states of the random generators at the beginning of the forward; see `get_rng_states`.
        autocast: `(enabled, dtype, cache)` of the device's autocast.
        module_modes: training mode of each module, and `requires_grad` of each parameter, in model order.
        grad_enabled: True if autograd was enabled in the forward.
        buffers: buffers that changed since the previous forward, by name.
        buffers_after: buffers that this forward changed, by name.
        events: samples of the modules' weights and outputs, in the order in which the forward used them.
        gradients: gradients of the differentiable outputs, by weight of the loss in a backward, then by index of the
            output.
        loss: index of the output that is the loss, and its value; None: the loss is computed outside the model.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    on_device: list[bool]
    rng_states: dict[str, Any]
    autocast: tuple[bool, torch.dtype, bool]
    module_modes: tuple[list[bool], list[bool]]
    grad_enabled: bool
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers_after: dict[str, torch.Tensor] = field(default_factory=dict)
    events: list[TraceEvent] = field(default_factory=list)
    gradients: dict[float, dict[int, torch.Tensor]] = field(default_factory=dict)
    loss: tuple[int, float] | None = None

    @property
    def max_summands(self) -> int:
        """Number of elements of the largest argument: an estimate of the summands of a gradient."""
        return max((tensor.numel() for tensor in iterate_tensors((self.args, self.kwargs))), default=1)


def begin_recording(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> RecordedForward:
    """Record the inputs and modes of a forward that is about to run."""
    found = list(iterate_tensors((args, kwargs)))
    kept_args, kept_kwargs = _copy_to_device((args, kwargs), torch.device("cpu"))
    kind = device.type
    return RecordedForward(
        kept_args,
        kept_kwargs,
        [tensor.device.type == kind for tensor in found],
        get_rng_states(device),
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()),
        ([module.training for module in model.modules()], [p.requires_grad for p in model.parameters()]),
        torch.is_grad_enabled(),
    )


def replay_arguments(forward: RecordedForward, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return fresh copies of the arguments with which to call a copy of the model."""
    here: tuple[tuple[Any, ...], dict[str, Any]] = _copy_to_device(
        (forward.args, forward.kwargs), device, forward.on_device
    )
    return here


def _copy_to_device(value: Any, device: torch.device, which: list[bool] | None = None) -> Any:
    memo: dict[int, Any] = {}
    for number, tensor in enumerate(iterate_tensors(value)):
        target = device if which is None or which[number] else tensor.device
        memo[id(tensor)] = tensor.detach().to(target, copy=True).requires_grad_(tensor.requires_grad)
    return copy.deepcopy(value, memo)


def get_rng_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators that a model may use: torch's, Python's and NumPy's."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    return states


@contextmanager
def use_rng_states(states: dict[str, Any], device: torch.device) -> Iterator[None]:
    """Use the random states `states` inside the context, and restore the previous ones afterwards."""
    before = get_rng_states(device)
    _set_rng_states(states, device)
    try:
        yield
    finally:
        _set_rng_states(before, device)


@contextmanager
def impersonate_rank(rank: int) -> Iterator[None]:
    """Make `dist.get_rank()` return `rank` inside the context. Collectives raise `ModelError`, since no other rank runs
    the replay.
    """
    own = dist.get_rank

    def asked(group: Any = None) -> int:
        return rank if group is None or group is dist.group.WORLD else own(group)

    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, "get_rank", asked))
        for name in _COLLECTIVES:
            if hasattr(dist, name):
                stack.enter_context(patch.object(dist, name, _refuse_collective(name)))
        yield


def _refuse_collective(name: str) -> Any:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise ModelError(
            f"the model's forward calls torch.distributed.{name}, so its output is not that of one rank alone: verify "
            "replays each rank's forward separately; call it outside the model, on the model's output"
        )

    return refused


def _set_rng_states(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])
