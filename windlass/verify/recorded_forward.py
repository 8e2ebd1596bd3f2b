"""One forward of the sharded model, with all that a plain copy needs to do it again."""

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
    """A forward, and the gradients that came back to its outputs.

    Attributes:
        args: positional arguments, tensors on the CPU and without graph.
        on_device: of the arguments' tensors, in the order in which `tensors` finds them, whether the device had them.
        random: states of the generators at its beginning; see `random_states`.
        autocast: `(enabled, dtype, cache)` of the device's autocast.
        training: the mode of each module, and `requires_grad` of each parameter, in the model's order.
        grad: whether gradients were recorded.
        buffers: by name, what changed since the call before.
        buffers_after: by name, what the call itself changed.
        events: what the modules saw and made.
        gradients: by weight of the backward and number of the exit, the gradient that came in there.
        loss: number of the exit that is the loss, and the loss; None: it is computed outside.
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
        """Elements of the largest argument: as many summands may a gradient have."""
        return max((tensor.numel() for tensor in iterate_tensors((self.args, self.kwargs))), default=1)


def begin_recording(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> RecordedForward:
    """A call that is about to run."""
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
    """What to call a copy of the model with; new tensors each time."""
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
    """States of the generators that a model may draw from: torch's, Python's, NumPy's."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    return states


@contextmanager
def use_rng_states(states: dict[str, Any], device: torch.device) -> Iterator[None]:
    """Draw random numbers from `states` inside, and go on from where it was after."""
    before = get_rng_states(device)
    _set_rng_states(states, device)
    try:
        yield
    finally:
        _set_rng_states(before, device)


@contextmanager
def impersonate_rank(rank: int) -> Iterator[None]:
    """Inside, a forward that asks for its rank hears `rank`, and one that would communicate is refused: nobody else
    runs it now."""
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
            "does each rank's forward again by itself; call it outside of the model, on what that returns"
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
