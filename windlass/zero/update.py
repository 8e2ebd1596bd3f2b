"""Steps the optimizer on this rank's spans: the user's own optimizer class sees flat pieces of parameters.

An elementwise rule gives the same result on any piece of a parameter, so each rank runs the very class that the user
chose on its pieces of the master weights. The state that it makes, `step` included, is kept by piece, so a parameter
that had no gradient anywhere is skipped exactly as torch skips it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.optim.elementwise import supports_grad_scale
from windlass.zero.gradients import Slot
from windlass.zero.layout import Piece
from windlass.zero.unit import Unit


class Segment:
    """A piece of a parameter that this rank updates."""

    def __init__(self, slot: Slot, piece: Piece) -> None:
        self.slot, self.piece = slot, piece
        assert slot.unit.master is not None
        flat = slot.unit.master.narrow(0, piece.offset, piece.numel)
        self.tensor = nn.Parameter(flat, requires_grad=True)

    @property
    def parameter(self) -> nn.Parameter:
        return self.slot.unit.parameters[self.piece.index]

    @property
    def name(self) -> str:
        return self.slot.unit.names[self.piece.index]

    def take_gradient(self, scratch: torch.Tensor) -> None:
        """Point `.grad` at this piece of the reduced gradient, which `scratch` `[shard]` holds."""
        self.tensor.grad = scratch.narrow(0, self.piece.offset, self.piece.numel)


def clone_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same class with the same attributes, and state and groups of its own, as yet empty."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler may have wrapped the original's; that would step the original
    twin.state = defaultdict(dict)
    twin.param_groups = []
    return twin


class ElementwiseUpdate:
    """Runs an elementwise optimizer on this rank's segments, a bounded number of elements at a time.

    Args:
        optimizer: the user's; its groups say which parameters and with which hyper-parameters.
        slots: gradients of the trainable units.
        sub_group: elements of one call (`sub_group_size`); bounds what a rule takes for temporaries.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, slots: list[Slot], sub_group: int) -> None:
        self.optimizer, self._slots = optimizer, slots
        self._inner = clone_optimizer(optimizer)
        self._scales = supports_grad_scale(optimizer)
        self.segments = [Segment(slot, piece) for slot in slots for piece in slot.unit.pieces()]
        self._batches = batches(slots, sub_group)
        self._of_slot: dict[int, list[Segment]] = defaultdict(list)
        for segment in self.segments:
            self._of_slot[id(segment.slot)].append(segment)
        self._take_over_state()

    def entries(self) -> Iterator[tuple[Unit, int, int, int, dict[str, Any]]]:
        """This rank's optimizer states: `(unit, parameter, start, stop, state)` for each piece that it steps."""
        for segment in self.segments:
            piece = segment.piece
            yield segment.slot.unit, piece.index, piece.start, piece.stop, self._inner.state[segment.tensor]

    def run(self, used: list[list[bool]], divisor: float) -> Iterator[list[Slot]]:
        """Update batch after batch of units; yields each batch once its masters are new.

        Args:
            used: by slot and parameter; the unused are skipped.
            divisor: gradients are divided by it (loss scale over clip coefficient).
        """
        places = {id(slot): number for number, slot in enumerate(self._slots)}
        group_of = self._groups()
        for batch in self._batches:
            chosen: dict[int, list[Segment]] = defaultdict(list)
            for slot in batch:
                if not slot.holds:
                    continue
                gradient = self._gradient(slot, divisor)
                for segment in self._of_slot[id(slot)]:
                    group = group_of.get(id(segment.parameter))
                    if group is not None and used[places[id(slot)]][segment.piece.index]:
                        segment.take_gradient(gradient)
                        chosen[group].append(segment)
            self._step(chosen, divisor)
            yield batch

    def _groups(self) -> dict[int, int]:
        """By parameter, the number of its group; read at every step, since groups may change."""
        return {id(p): n for n, group in enumerate(self.optimizer.param_groups) for p in group["params"]}

    def _gradient(self, slot: Slot, divisor: float) -> torch.Tensor:
        assert slot.shard is not None and slot.unit.master is not None
        gradient = slot.shard
        if gradient.dtype != slot.unit.master.dtype:
            gradient = gradient.to(slot.unit.master.dtype)
        if divisor != 1.0 and not self._scales:
            gradient.div_(divisor)
        return gradient

    def _step(self, chosen: dict[int, list[Segment]], divisor: float) -> None:
        inner = self._inner
        if self._scales and divisor != 1.0 and chosen:
            device = next(iter(chosen.values()))[0].tensor.device
            inner.grad_scale = torch.full((), divisor, dtype=torch.float32, device=device)  # type: ignore[attr-defined]
            inner.found_inf = torch.zeros((), dtype=torch.float32, device=device)  # type: ignore[attr-defined]
        for part in self._parts(chosen):
            run_groups(self.optimizer, inner, part)
        for name in ("grad_scale", "found_inf"):
            inner.__dict__.pop(name, None)

    def _parts(self, chosen: dict[int, list[Segment]]) -> list[dict[int, list[nn.Parameter]]]:
        """What may be stepped in one call. Torch's fused SGD takes tensors with a momentum or ones without, not
        both."""
        tensors = {number: [segment.tensor for segment in segments] for number, segments in chosen.items()}
        if type(self._inner) is not torch.optim.SGD:
            return [tensors]
        parts: list[dict[int, list[nn.Parameter]]] = [{}, {}]
        for number, group in tensors.items():
            for tensor in group:
                parts[bool(self._inner.state.get(tensor))].setdefault(number, []).append(tensor)
        return [part for part in parts if part]

    def _take_over_state(self) -> None:
        """State that the user's optimizer brought along, cut to this rank's segments."""
        for segment in self.segments:
            given = self.optimizer.state.get(segment.parameter)
            if not given:
                continue
            shape, piece = segment.slot.unit.shapes[segment.piece.index], segment.piece
            for key, value in given.items():
                if isinstance(value, torch.Tensor) and value.shape == shape and value.numel() > 0 and value.dim() > 0:
                    value = value.detach().reshape(-1)[piece.start : piece.stop].clone()
                elif isinstance(value, torch.Tensor):
                    value = value.detach().clone()
                self._inner.state[segment.tensor][key] = value
        self.optimizer.state.clear()


def run_groups(
    optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer, tensors: dict[int, list[nn.Parameter]]
) -> None:
    """Step `inner` once on `tensors` (by group number) under the hyper-parameters of `optimizer`'s groups as they
    are now.

    What a rule writes into its group comes back to the user's; gradients are dropped.
    """
    groups = optimizer.param_groups
    inner.param_groups = [{**group, "params": tensors.get(number, [])} for number, group in enumerate(groups)]
    inner.step()
    for number, group in enumerate(inner.param_groups):
        groups[number].update({key: value for key, value in group.items() if key != "params"})
    for stepped in tensors.values():
        for tensor in stepped:
            tensor.grad = None


def batches(slots: list[Slot], limit: int) -> list[list[Slot]]:
    """Slots from the last to the first (what the next forward wants first is updated last), at most `limit` elements
    each."""
    batches: list[list[Slot]] = []
    size = 0
    for slot in reversed(slots):
        span = slot.unit.state_stop - slot.unit.state_start
        if not batches or size + span > limit:
            batches.append([])
            size = 0
        batches[-1].append(slot)
        size += span
    return batches


def check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """The optimizer's parameters are the model's.

    Raises:
        ModelError: one is not; says its group, place and shape.
    """
    own = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                raise ModelError(
                    f"optimizer group {number}, parameter {place}, of shape {tuple(parameter.shape)}, is none of the "
                    f"model's; "
                    "build the optimizer from the parameters of the very model that is passed (after moving or "
                    "wrapping it)"
                )
