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
from windlass.base.tree import tensors
from windlass.verify.trace import Event

_COMMUNICATES = (
    *("all_reduce", "reduce", "broadcast", "barrier", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "gather", "gather_object"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "scatter", "broadcast_object_list"),
    *("all_to_all", "all_to_all_single"),
)


@dataclass
class Call:
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
    random: dict[str, Any]
    autocast: tuple[bool, torch.dtype, bool]
    training: tuple[list[bool], list[bool]]
    grad: bool
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers_after: dict[str, torch.Tensor] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    gradients: dict[float, dict[int, torch.Tensor]] = field(default_factory=dict)
    loss: tuple[int, float] | None = None

    @property
    def rows(self) -> int:
        """Elements of the largest argument: as many summands may a gradient have."""
        return max((tensor.numel() for tensor in tensors((self.args, self.kwargs))), default=1)


def begin_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Call:
    """A call that is about to run."""
    found = list(tensors((args, kwargs)))
    kept_args, kept_kwargs = _copied((args, kwargs), torch.device("cpu"))
    kind = device.type
    return Call(
        kept_args,
        kept_kwargs,
        [tensor.device.type == kind for tensor in found],
        random_states(device),
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()),
        ([module.training for module in model.modules()], [p.requires_grad for p in model.parameters()]),
        torch.is_grad_enabled(),
    )


def arguments(call: Call, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What to call a copy of the model with; new tensors each time."""
    here: tuple[tuple[Any, ...], dict[str, Any]] = _copied((call.args, call.kwargs), device, call.on_device)
    return here


def _copied(value: Any, device: torch.device, which: list[bool] | None = None) -> Any:
    memo: dict[int, Any] = {}
    for number, tensor in enumerate(tensors(value)):
        target = device if which is None or which[number] else tensor.device
        memo[id(tensor)] = tensor.detach().to(target, copy=True).requires_grad_(tensor.requires_grad)
    return copy.deepcopy(value, memo)


def random_states(device: torch.device) -> dict[str, Any]:
    """States of the generators that a model may draw from: torch's, Python's, NumPy's."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    return states


@contextmanager
def drawing_from(states: dict[str, Any], device: torch.device) -> Iterator[None]:
    """Draw random numbers from `states` inside, and go on from where it was after."""
    before = random_states(device)
    _set(states, device)
    try:
        yield
    finally:
        _set(before, device)


@contextmanager
def in_place_of(rank: int) -> Iterator[None]:
    """Inside, a forward that asks for its rank hears `rank`, and one that would communicate is refused: nobody else
    runs it now."""
    own = dist.get_rank

    def asked(group: Any = None) -> int:
        return rank if group is None or group is dist.group.WORLD else own(group)

    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, "get_rank", asked))
        for name in _COMMUNICATES:
            if hasattr(dist, name):
                stack.enter_context(patch.object(dist, name, _refuser(name)))
        yield


def _refuser(name: str) -> Any:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise ModelError(
            f"the model's forward calls torch.distributed.{name}, so its output is not that of one rank alone: verify "
            "does each rank's forward again by itself; call it outside of the model, on what that returns"
        )

    return refused


def _set(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])
