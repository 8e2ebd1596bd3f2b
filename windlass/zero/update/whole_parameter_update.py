"""Steps an optimizer that needs whole parameters: norms of a layer (LAMB), matrices (Muon), or a rule nobody knows.

Each parameter has one owner rank. Before the step the owner collects the pieces of its master weight and gradient,
steps the user's optimizer class on the parameter in its own shape, and sends the pieces back. The state stays with the
owner. Ranks that keep everything (no cut) each step everything, as plain data parallelism does.

[Note: whole steps of parts] Of a parameter that is cut over tp or ep, each part has an owner among the data ranks of
its part, at the same place. These owners put weight, gradient and states of their parts together, all step the whole,
and each keeps its own part of weight and states. So states rest and are saved as those of elementwise rules are, and a
state that has another shape than its parameter (one value a row) is the same on all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from windlass.comm.point_to_point import exchange_tensors
from windlass.comm.rank_group import RankGroup
from windlass.optim.cpu_optimizer import StateFormat
from windlass.optim.elementwise_optimizers import SCALAR_STATES
from windlass.parallel.full_parameters import gather_full, select_local_shard
from windlass.parallel.placement import Placement, get_global_numel
from windlass.storage.slot import Tier
from windlass.zero.core.dp_group import DataParallelGroup
from windlass.zero.core.unit import Unit
from windlass.zero.update.elementwise_update import clone_optimizer, formats_of, state_dtype
from windlass.zero.update.optimizer_step_session import OptimizerStepSession
from windlass.zero.update.rank_state import RankState
from windlass.zero.update.update_chunk import StateEntry, UpdateChunk, batch_chunks
from windlass.zero.update.update_protocol import UpdateContext


@dataclass(eq=False)
class OwnedParameter:
    """A parameter and who steps it; `tensor` carries its optimizer state and, during a step, its values."""

    chunk: UpdateChunk
    index: int
    owner: int
    tensor: nn.Parameter

    @property
    def name(self) -> str:
        return self.chunk.unit.names[self.index]

    @property
    def parameter(self) -> nn.Parameter:
        return self.chunk.unit.parameters[self.index]

    @property
    def group(self) -> RankGroup:
        """The ranks that have pieces of it."""
        return self.chunk.unit.dp_group.group

    @property
    def placement(self) -> Placement:
        """What of the whole parameter lies among the ranks of its group."""
        return self.chunk.unit.placements[self.index]

    @property
    def is_local(self) -> bool:
        """This rank steps it."""
        return self.owner == self.group.index


class WholeParameterUpdate:
    """Runs any optimizer whose update of a parameter depends on that parameter alone.

    Args:
        optimizer: the user's.
        context: see there; of each trainable unit the masters have one chunk, `axes` are those along which parameters
            are sharded besides, and `sub_group_numel` is the elements gathered at a time.
    """

    needs_whole_parameters: ClassVar[bool] = True
    reduces_itself: ClassVar[bool] = False

    def __init__(self, optimizer: torch.optim.Optimizer, context: UpdateContext) -> None:
        chunks, residence = context.masters.chunks, context.masters.state_offload
        self.optimizer, self.chunks = optimizer, chunks
        self._dp_groups, self._axes = context.dp_groups, context.axes
        self._inner = clone_optimizer(optimizer)
        self.state_offload = residence
        residence.states = self._inner.state
        self._whole = not context.shards_states  # nothing is exchanged then
        self._sub_group = context.sub_group_numel
        self.owned: list[OwnedParameter] = []
        self._of_chunk: dict[int, list[OwnedParameter]] = defaultdict(list)
        self.add_chunks(chunks)
        for chunk in chunks:
            mine = [owned for owned in self._of_chunk[id(chunk)] if owned.is_local]
            with residence.resident([chunk]) if optimizer.state else nullcontext():
                for owned in mine:
                    if given := optimizer.state.get(owned.parameter):
                        self._inner.state[owned.tensor] = _moved(given, owned, optimizer)
        optimizer.state.clear()

    def add_chunks(self, chunks: list[UpdateChunk]) -> None:
        """As `ElementwiseUpdate.grow`; the same on all ranks."""
        added = self._assign(chunks)
        self.owned += added
        for owned in added:
            self._of_chunk[id(owned.chunk)].append(owned)
        for chunk in chunks:
            mine = [owned for owned in self._of_chunk[id(chunk)] if owned.is_local]
            chunk.state_keys = [owned.tensor for owned in mine]
        self._batches = batch_chunks(self.chunks, self._sub_group, self._size)

    def cannot_step(self, dtype: torch.dtype, home: Tier) -> bool:
        """As `ElementwiseUpdate.refuses`."""
        return False

    def state_entries(self, unit: Unit | None = None) -> Iterator[StateEntry]:
        """As `ElementwiseUpdate.tenancies`; an owner has the whole of a parameter's state, in the parameter's shape."""
        for owned in self.owned:
            of = owned.chunk.unit
            if owned.is_local and (unit is None or unit is of):
                numel, shape = of.layout.numels[owned.index], of.shapes[owned.index]
                yield StateEntry(owned.chunk, owned.tensor, owned.index, 0, numel, shape)

    def rank_states(self) -> Iterator[RankState]:
        """Yield none: ranks keep equal states, or shards of them."""
        return iter(())

    def formats(self) -> dict[int, dict[str, StateFormat]]:
        """As `ElementwiseUpdate.formats`."""
        return formats_of(self.optimizer, self._inner)

    def run(self, used: dict[int, list[bool]], divisor: float) -> Iterator[list[UpdateChunk]]:
        """As `ElementwiseUpdate.run`. Collective."""
        turn = OptimizerStepSession(self.optimizer, self._inner)
        group_of = {id(p): n for n, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        wanted = self._wanted(used, group_of)
        for batch in self.state_offload.iterate_batches(self._batches):
            todo = [owned for chunk in batch for owned in self._of_chunk[id(chunk)] if id(owned) in wanted]
            for chunk in batch:
                if chunk.gradient is None and any(owned.chunk is chunk for owned in todo):
                    chunk.gradient = torch.zeros_like(chunk.values())  # only other parts of it have one
            values = self._collect(todo, gradient=False)
            gradients = self._collect(todo, gradient=True)
            tensors: dict[int, list[nn.Parameter]] = defaultdict(list)
            for owned in todo:
                if id(owned) in values:
                    shape = owned.chunk.unit.shapes[owned.index]
                    owned.tensor.data = self._assemble(owned, values[id(owned)].view(shape))
                    owned.tensor.grad = self._assemble(owned, gradients[id(owned)].view(shape)).div_(divisor)
                    self._join_states(owned)
                    tensors[group_of[id(owned.parameter)]].append(owned.tensor)
            turn.step(tensors)
            for owned in todo:
                if id(owned) in values and not owned.placement.is_full:
                    self._part(owned)
            self._return(todo, values)
            for owned in todo:
                owned.tensor.data = owned.tensor.data.new_empty(0)
            yield batch
        turn.end(None if self._whole else self._dp_groups[0].group)

    def _size(self, chunk: UpdateChunk) -> int:
        """What a chunk counts in a batch, the same on all ranks that step together: batches are."""
        unit = chunk.unit
        alike = not unit.kind.is_expert or all(not placement.is_full for placement in unit.placements)
        return sum(map(get_global_numel, unit.parameters)) // unit.dp_group.group.size if alike else 0

    def _wanted(self, used: dict[int, list[bool]], group_of: dict[int, int]) -> set[int]:
        """Which parameters are stepped, by id of the entry: those with a gradient, on any rank that has another part.
        Collective where parameters are cut."""
        mine = [
            owned.chunk.slot.has_reduced
            and used[owned.chunk.unit.index][owned.index]
            and id(owned.parameter) in group_of
            for owned in self.owned
        ]
        for name in sorted({axis for owned in self.owned for axis in owned.placement.sharded_axes}):
            cut = [number for number, owned in enumerate(self.owned) if name in owned.placement.sharded_axes]
            device = self.chunks[0].unit.full.device
            flags = torch.tensor([float(mine[number]) for number in cut], device=device)
            self._axes[name].all_reduce(flags)
            for number, flag in zip(cut, flags.tolist(), strict=True):
                mine[number] = flag > 0
        return {id(owned) for owned, wants in zip(self.owned, mine, strict=True) if wants}

    def _assemble(self, owned: OwnedParameter, part: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor of which each owner has its part. Collective over them."""
        if owned.placement.is_full:
            return part
        device = owned.chunk.unit.full.device  # where the groups of the axes send from, wherever masters rest
        return gather_full(part.to(device), owned.placement, self._axes).to(part.device)

    def _join_states(self, owned: OwnedParameter) -> None:
        """Make the states of a part those of the whole. Collective over the owners of its parts."""
        placement = owned.placement
        if placement.is_full:
            return
        state = self._inner.state.get(owned.tensor, {})
        for key, value in state.items():
            if _is_part(key, value, placement):
                state[key] = self._assemble(owned, value)

    def _part(self, owned: OwnedParameter) -> None:
        """Keep this rank's part of the weight that was stepped and of its states."""
        placement = owned.placement
        owned.tensor.data = select_local_shard(owned.tensor.data.view(placement.global_shape), placement)
        state = self._inner.state.get(owned.tensor, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == placement.global_shape:
                state[key] = select_local_shard(value, placement)

    def _assign(self, chunks: list[UpdateChunk]) -> list[OwnedParameter]:
        """An owner for each parameter, the largest first to whoever has least."""
        found = [
            (get_global_numel(parameter), number, index)  # the same wherever another part lies
            for number, chunk in enumerate(chunks)
            for index, parameter in enumerate(chunk.unit.parameters)
        ]
        loads = {id(family): [0] * family.group.size for family in self._dp_groups}
        for before in self.owned:
            loads[id(before.chunk.unit.dp_group)][before.owner] += get_global_numel(before.parameter)
        owners: dict[tuple[int, int], int] = {}
        for numel, number, index in sorted(found, key=lambda entry: (-entry[0], entry[1], entry[2])):
            family = chunks[number].unit.dp_group
            load = loads[id(family)]
            owner = family.group.index if self._whole else load.index(min(load))
            load[owner] += numel
            owners[number, index] = owner
        owned = []
        for numel, number, index in found:
            chunk = chunks[number]
            if numel:
                tensor = nn.Parameter(torch.empty(0, dtype=chunk.state_dtype, device=chunk.device))
                owned.append(OwnedParameter(chunk, index, owners[number, index], tensor))
        return owned

    def _spans(self, owned: OwnedParameter) -> list[tuple[int, int, int, int]]:
        """Who has which part of a parameter: `(rank, start, stop, offset in that rank's span)`."""
        layout, group = owned.chunk.unit.layout, owned.group
        if self._whole or group.size == 1:
            return [(group.index, 0, layout.numels[owned.index], layout.offsets[owned.index])]
        spans = []
        for rank in range(group.size):
            start, stop = layout.shard_range(rank, group.size)
            first = max(start, layout.offsets[owned.index])
            last = min(stop, layout.offsets[owned.index] + layout.numels[owned.index])
            if first < last:
                base = layout.offsets[owned.index]
                spans.append((rank, first - base, last - base, first - start))
        return spans

    def _collect(self, todo: list[OwnedParameter], *, gradient: bool) -> dict[int, torch.Tensor]:
        """The whole flat values of the parameters that this rank owns, by id of the entry. Collective."""
        result: dict[int, torch.Tensor] = {}
        moves = [_PointToPointMoves(family) for family in self._dp_groups]
        for owned in todo:
            master, move, me = owned.chunk.values(), self._move_of(owned, moves), owned.group.index
            source = owned.chunk.gradient if gradient else master
            assert source is not None
            dtype, numel = owned.chunk.state_dtype, owned.chunk.unit.layout.numels[owned.index]
            whole = master.new_empty(numel, dtype=dtype) if owned.is_local else None
            if whole is not None:
                result[id(owned)] = whole
            for rank, start, stop, offset in self._spans(owned):
                if rank == me and whole is not None:
                    whole[start:stop].copy_(source.narrow(0, offset, stop - start))
                elif rank == me:
                    move.sends.append((owned.owner, source.narrow(0, offset, stop - start).to(dtype)))
                elif whole is not None:
                    move.receives.append((rank, whole[start:stop]))
        for move in moves:
            move.make()
        return result

    def _return(self, todo: list[OwnedParameter], values: dict[int, torch.Tensor]) -> None:
        """Send the new values back to who keeps their pieces. Collective."""
        moves = [_PointToPointMoves(family) for family in self._dp_groups]
        for owned in todo:
            master, move, me = owned.chunk.values(), self._move_of(owned, moves), owned.group.index
            # the rule may have replaced the tensor's data rather than written to it
            whole = owned.tensor.detach().reshape(-1) if id(owned) in values else None
            for rank, start, stop, offset in self._spans(owned):
                if rank == me and whole is not None:
                    master.narrow(0, offset, stop - start).copy_(whole[start:stop])
                elif rank == me:
                    move.receives.append((owned.owner, master.narrow(0, offset, stop - start)))
                elif whole is not None:
                    move.sends.append((rank, whole[start:stop].to(master.dtype)))
        for move in moves:
            move.make()

    def _move_of(self, owned: OwnedParameter, moves: list[_PointToPointMoves]) -> _PointToPointMoves:
        return next(move for move in moves if move.family is owned.chunk.unit.dp_group)


@dataclass(eq=False)
class _PointToPointMoves:
    """What ranks of a family tell each other at once."""

    family: DataParallelGroup
    sends: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    receives: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    def make(self) -> None:
        moved = exchange_tensors(self.family.group, self.sends, self.receives)
        self.family.transport.traffic.bytes_moved["whole"] += moved


def _is_part(key: str, value: Any, placement: Placement) -> bool:
    """Whether a state of a part has one value for each of its elements."""
    shaped = isinstance(value, torch.Tensor) and value.dim() > 0 and key not in SCALAR_STATES
    return shaped and tuple(value.shape) == placement.local_shape


def _moved(state: dict[str, Any], owned: OwnedParameter, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A parameter's state where it is stepped; counts stay where their rule put them."""
    moved = dict(state)
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or key in SCALAR_STATES:
            continue
        if value.shape == owned.parameter.shape:
            moved[key] = value.to(owned.chunk.device, state_dtype(optimizer, value.dtype, owned.chunk))
        elif value.dim() > 0:
            moved[key] = value.to(owned.chunk.device)
    return moved
