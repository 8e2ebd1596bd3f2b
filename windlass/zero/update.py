"""Steps the optimizer on this rank's spans: the user's own optimizer class sees flat pieces of parameters.

An elementwise rule gives the same result on any piece of a parameter, so each rank runs the very class that the user
chose on its pieces of the master weights. The state that it makes, `step` included, is kept by piece, so a parameter
that had no gradient anywhere is skipped exactly as torch skips it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.optim.cpu import as_native
from windlass.optim.cpu_optimizer import CPUOptimizer
from windlass.optim.elementwise import supports_grad_scale
from windlass.storage.slot import Home
from windlass.zero.chunk import Chunk, batches
from windlass.zero.layout import Piece
from windlass.zero.masters import Masters
from windlass.zero.unit import Unit


class Segment:
    """A piece of a parameter that this rank updates."""

    def __init__(self, chunk: Chunk, piece: Piece) -> None:
        self.chunk, self.piece = chunk, piece
        self.tensor = nn.Parameter(torch.empty(0, dtype=chunk.dtype, device=chunk.device), requires_grad=True)
        if chunk.master is not None:
            self.point()

    @property
    def parameter(self) -> nn.Parameter:
        return self.chunk.unit.parameters[self.piece.index]

    @property
    def name(self) -> str:
        return self.chunk.unit.names[self.piece.index]

    def point(self) -> None:
        """See the master weights where they are now."""
        self.tensor.data = self.chunk.values().narrow(0, self.piece.offset, self.piece.numel)

    def take_gradient(self, gradient: torch.Tensor) -> None:
        """Point `.grad` at this piece of the chunk's reduced gradient `[chunk]`."""
        self.tensor.grad = gradient.narrow(0, self.piece.offset, self.piece.numel)


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
        masters: what this rank updates.
        sub_group: elements of one call (`sub_group_size`); bounds what a rule takes for temporaries.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: Masters,
        sub_group: int,
    ) -> None:
        chunks, residence = masters.chunks, masters.residence
        self.optimizer, self.chunks, self.residence, self._masters = optimizer, chunks, residence, masters
        self._inner = self._native() or clone_optimizer(optimizer)
        residence.states = self._inner.state
        self._scales = supports_grad_scale(self._inner)
        self._of_chunk = {id(chunk): [Segment(chunk, piece) for piece in chunk.pieces()] for chunk in chunks}
        self._batches = batches(chunks, sub_group)
        self._lowered: dict[torch.Tensor, torch.Tensor] = {}
        self._now: list[dict[str, Any]] = []  # the groups of the update that runs
        for chunk in chunks:
            chunk.tenants = [segment.tensor for segment in self._of_chunk[id(chunk)]]
            with residence.at_hand([chunk]) if optimizer.state else nullcontext():
                self._take_over_state(chunk)
        optimizer.state.clear()

    def entries(self) -> Iterator[tuple[Unit, int, int, int, dict[str, Any]]]:
        """This rank's optimizer states: `(unit, parameter, start, stop, state)` for each piece that it steps. Those on
        disk must be at hand."""
        for chunk in self.chunks:
            for segment in self._of_chunk[id(chunk)]:
                piece = segment.piece
                yield chunk.unit, piece.index, piece.start, piece.stop, self._inner.state[segment.tensor]

    def run(self, used: dict[int, list[bool]], divisor: float) -> Iterator[list[Chunk]]:
        """Update batch after batch, under the hyper-parameters of this moment; yields each once its masters are new.

        Args:
            used: by unit and parameter; the unused are skipped.
            divisor: gradients are divided by it (loss scale over clip coefficient).
        """
        group_of = self._groups()
        scaled = self._inner if isinstance(self._inner, CPUOptimizer) else self.optimizer
        self._scales = supports_grad_scale(scaled)  # of the groups as they are now
        # no elementwise rule writes into its groups, so that a copy will do
        groups = self.optimizer.param_groups
        self._now = [{key: _kept(value) for key, value in group.items() if key != "params"} for group in groups]
        return self._run(used, divisor, group_of)

    def _run(self, used: dict[int, list[bool]], divisor: float, group_of: dict[int, int]) -> Iterator[list[Chunk]]:
        for batch in self.residence.travel(self._batches):
            chosen: dict[int, list[Segment]] = defaultdict(list)
            for chunk in batch:
                if chunk.gradient is None:
                    continue
                gradient = self._gradient(chunk, chunk.gradient, divisor)
                skipped = False
                for segment in self._of_chunk[id(chunk)]:
                    group = group_of.get(id(segment.parameter))
                    if group is not None and used[chunk.unit.index][segment.piece.index]:
                        if chunk.home is Home.NVME:
                            segment.point()
                        segment.take_gradient(gradient)
                        chosen[group].append(segment)
                    else:
                        skipped = True
                if not skipped:
                    self._lower(chunk)
            self._step(chosen, divisor)
            yield batch

    def _native(self) -> torch.optim.Optimizer | None:
        """The same rule in one pass over host memory, where all of it is updated there, and in float32."""
        held = [chunk for chunk in self.chunks if chunk.numel]
        if any(chunk.home is Home.DEVICE or chunk.dtype != torch.float32 for chunk in held):
            return None
        native = as_native(self.optimizer)
        if native is not None:
            native.state, native.param_groups = defaultdict(dict), []
        return native

    def _lower(self, chunk: Chunk) -> None:
        """Have the 16-bit copy of a chunk written in the same pass; every piece of it is updated now."""
        if not isinstance(self._inner, CPUOptimizer) or chunk.unit.dtype not in (torch.bfloat16, torch.float16):
            return
        chunk.lowered = self._masters.lowering(chunk)
        for segment in self._of_chunk[id(chunk)]:
            piece = segment.piece
            self._lowered[segment.tensor] = chunk.lowered.narrow(0, piece.offset, piece.numel)

    def _groups(self) -> dict[int, int]:
        """By parameter, the number of its group; read at every step, since groups may change."""
        return {id(p): n for n, group in enumerate(self.optimizer.param_groups) for p in group["params"]}

    def _gradient(self, chunk: Chunk, gradient: torch.Tensor, divisor: float) -> torch.Tensor:
        if gradient.dtype != chunk.values().dtype:
            gradient = gradient.to(chunk.values().dtype)
        if divisor != 1.0 and not self._scales:
            gradient.div_(divisor)
        return gradient

    def _step(self, chosen: dict[int, list[Segment]], divisor: float) -> None:
        inner = self._inner
        if self._scales and divisor != 1.0 and chosen:
            device = next(iter(chosen.values()))[0].tensor.device
            inner.grad_scale = torch.full((), divisor, dtype=torch.float32, device=device)  # type: ignore[attr-defined]
            inner.found_inf = torch.zeros((), dtype=torch.float32, device=device)  # type: ignore[attr-defined]
        if self._lowered:
            inner.lowered = self._lowered  # type: ignore[attr-defined]
        for part in self._parts(chosen):
            run_groups(self._now, inner, part)
        for name in ("grad_scale", "found_inf", "lowered"):
            inner.__dict__.pop(name, None)
        self._lowered = {}

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

    def _take_over_state(self, chunk: Chunk) -> None:
        """State that the user's optimizer brought along, cut to this rank's segments."""
        for segment in self._of_chunk[id(chunk)]:
            given = self.optimizer.state.get(segment.parameter)
            if not given:
                continue
            piece, home = segment.piece, segment.tensor.device
            shape = segment.chunk.unit.shapes[piece.index]
            for key, value in given.items():
                if isinstance(value, torch.Tensor) and value.shape == shape and value.numel() > 0 and value.dim() > 0:
                    value = value.detach().reshape(-1)[piece.start : piece.stop].to(home, copy=True)
                elif isinstance(value, torch.Tensor):
                    value = value.detach().clone()
                self._inner.state[segment.tensor][key] = value


def run_groups(
    groups: list[dict[str, Any]], inner: torch.optim.Optimizer, tensors: dict[int, list[nn.Parameter]]
) -> None:
    """Step `inner` once on `tensors` (by group number) under the hyper-parameters of `groups`.

    What a rule writes into its group comes back to them; gradients are dropped.
    """
    inner.param_groups = [{**group, "params": tensors.get(number, [])} for number, group in enumerate(groups)]
    inner.step()
    for number, group in enumerate(inner.param_groups):
        groups[number].update({key: value for key, value in group.items() if key != "params"})
    for stepped in tensors.values():
        for tensor in stepped:
            tensor.grad = None


def _kept(value: Any) -> Any:
    """A hyper-parameter as it is now: a learning rate may be a tensor, which schedules change in place."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


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
