"""Update with an optimizer that needs full parameters: for norms (LAMB), for matrices (Muon), or because its rule is
unknown.

Each parameter has one owner rank. In a step, the owner receives the fragments of master weight and gradient, runs the
user's optimizer class on the parameter in its full shape, and sends the fragments of the new weight back. The state
stays on the owner. Without sharded states, every rank updates every parameter, as in plain data parallelism.

[Note: whole-parameter updates] A parameter that is sharded over tp or ep has one owner per part, at the same position
in each part's data-parallel group. The owners assemble the full weight, gradient and states from their parts by
all-reduce, all update the full parameter, and each keeps its own part of weight and states. So states are stored and
saved in the same parts as the parameter. A state of another shape (one value per row) is equal on all owners.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
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
from windlass.zero.update.optimizer_step_session import OptimizerStepSession, run_pre_step_hooks
from windlass.zero.update.rank_state import RankState
from windlass.zero.update.update_chunk import StateEntry, UpdateChunk, batch_chunks
from windlass.zero.update.update_protocol import OrdinaryUpdate, UpdateContext


@dataclass(eq=False)
class OwnedParameter:
    """Parameter, or its local part if it is sharded over tp or ep, and the rank that updates it.

    Attributes:
        chunk: chunk of the parameter's unit.
        index: index of the parameter in the unit.
        owner: index in `group` of the rank that updates the parameter.
        tensor: key of the optimizer's `state`. Holds the parameter's values on the owner during a step; otherwise
            empty.
    """

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
    def stepped_shape(self) -> torch.Size:
        """Shape of the parameter, or of its local part, in a step: `[1]` for a scalar, else unchanged.

        With shape `[]`, a state with one value per element could not be distinguished from a step count.
        """
        return self.chunk.unit.shapes[self.index] or torch.Size([1])

    @property
    def group(self) -> RankGroup:
        """Ranks that have fragments of the parameter."""
        return self.chunk.unit.dp_group.group

    @property
    def placement(self) -> Placement:
        """Placement of the parameter: the part of the full parameter that the ranks of its group hold."""
        return self.chunk.unit.placements[self.index]

    @property
    def is_local(self) -> bool:
        """True if this rank is the owner."""
        return self.owner == self.group.index


class WholeParameterUpdate(OrdinaryUpdate):
    """Update with any optimizer whose update of a parameter depends on no other parameter.

    Args:
        optimizer: the user's optimizer. Its existing states are moved to the owners.
        context: parts of the model that the update works on. The masters have one chunk per trainable unit, and
            `max_update_numel` is the maximum size of a batch in elements per data-parallel rank.
    """

    needs_whole_parameters: ClassVar[bool] = True
    reduces_itself: ClassVar[bool] = False
    steps_whole_units: ClassVar[bool] = True

    def __init__(self, optimizer: torch.optim.Optimizer, context: UpdateContext) -> None:
        chunks, state_offload = context.masters.chunks, context.masters.state_offload
        self.optimizer, self.chunks = optimizer, chunks
        self._dp_groups, self._axes = context.dp_groups, context.axes
        self._inner = clone_optimizer(optimizer)
        self.state_offload = state_offload
        state_offload.states = self._inner.state
        self._whole = not context.shards_states  # True: every rank owns all parameters, and no fragments are sent
        self._max_update_numel = context.max_update_numel
        self.owned: list[OwnedParameter] = []
        self._of_chunk: dict[int, list[OwnedParameter]] = defaultdict(list)
        self.add_chunks(chunks)
        for chunk in chunks:
            local = [owned for owned in self._of_chunk[id(chunk)] if owned.is_local]
            # A chunk on NVMe is stored again with the states that it gets here.
            with state_offload.resident([chunk]) if optimizer.state else nullcontext():
                for owned in local:
                    if given := optimizer.state.get(owned.parameter):
                        self._inner.state[owned.tensor] = _moved(given, owned, optimizer)
        optimizer.state.clear()  # the states are in `_inner` now; a second copy would only take memory

    def add_chunks(self, chunks: list[UpdateChunk]) -> None:
        """Update these chunks, too, and assign owners to their parameters. All ranks pass the same units."""
        added = self._assign(chunks)
        self.owned += added
        for owned in added:
            self._of_chunk[id(owned.chunk)].append(owned)
        for chunk in chunks:
            local = [owned for owned in self._of_chunk[id(chunk)] if owned.is_local]
            chunk.state_keys = [owned.tensor for owned in local]
        self._batches = batch_chunks(self.chunks, self._max_update_numel, self._size)

    def cannot_step(self, dtype: torch.dtype, tier: Tier) -> bool:
        """Return False: the user's class updates any dtype on any tier. See `ElementwiseUpdate.cannot_step`."""
        return False

    def state_entries(self, unit: Unit | None = None) -> Iterator[StateEntry]:
        """Yield an entry for each parameter that this rank owns, of one unit or of all."""
        for owned in self.owned:
            of = owned.chunk.unit
            if owned.is_local and (unit is None or unit is of):
                numel = of.layout.numels[owned.index]
                yield StateEntry(owned.chunk, owned.tensor, owned.index, 0, numel, owned.stepped_shape)

    def rank_states(self) -> Iterator[RankState]:
        """Yield nothing: this update has no per-rank states."""
        return iter(())

    def formats(self) -> dict[int, dict[str, StateFormat]]:
        """Return the storage format of each state, as `ElementwiseUpdate.formats` does."""
        return formats_of(self.optimizer, self._inner)

    def run(self, used: dict[int, list[bool]], divisor: float) -> Iterator[list[UpdateChunk]]:
        """See `Update.run`. Collective.

        If the optimizer or one of its hooks raises, the other ranks still wait for this rank in the exchanges below. So
        this rank takes part in all of them with its current values, and raises at the end.
        """
        failed: Exception | None = None
        try:
            run_pre_step_hooks(self.optimizer)
        except Exception as error:
            failed = error
        session = OptimizerStepSession(self.optimizer)
        group_of = {id(p): n for n, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        requested = self._wanted(used, group_of)
        for batch in self.state_offload.iterate_batches(self._batches):
            todo = [owned for chunk in batch for owned in self._of_chunk[id(chunk)] if id(owned) in requested]
            for chunk in batch:
                if chunk.gradient is None and any(owned.chunk is chunk for owned in todo):
                    chunk.gradient = torch.zeros_like(chunk.values())  # only other parts of a parameter have a gradient
            values = self._collect(todo, gradient=False)
            gradients = self._collect(todo, gradient=True)
            tensors: dict[int, list[nn.Parameter]] = defaultdict(list)
            for owned in todo:
                if id(owned) in values:
                    shape = owned.stepped_shape
                    owned.tensor.data = self._assemble(owned, values[id(owned)].view(shape))
                    owned.tensor.grad = self._assemble(owned, gradients[id(owned)].view(shape)).div_(divisor)
                    self._join_states(owned)
                    tensors[group_of[id(owned.parameter)]].append(owned.tensor)
            if failed is None:
                self.has_stepped = True
                try:
                    session.step(self._inner, tensors)
                except Exception as error:
                    failed = error
            for owned in todo:
                # The step computed the full parameter; this rank stores only its part of weight and states.
                if id(owned) in values and not owned.placement.is_full:
                    self._part(owned)
            self._return(todo, values)
            for owned in todo:  # free the full values before the next batch
                owned.tensor.data = owned.tensor.data.new_empty(0)
                owned.tensor.grad = None  # left by a step that raised
            yield batch
        session.end(None if self._whole else self._dp_groups[0].group, failed)

    def _size(self, chunk: UpdateChunk) -> int:
        """Return the size of a chunk for `batch_chunks`: elements of its full parameters per data-parallel rank.

        The size is equal on all ranks of a pipeline stage, so that they form the same batches. A unit of experts that
        are not sharded has size 0, because other ranks have units of other experts.
        """
        unit = chunk.unit
        is_equal_on_all = not unit.kind.is_expert or all(not placement.is_full for placement in unit.placements)
        return sum(map(get_global_numel, unit.parameters)) // unit.dp_group.group.size if is_equal_on_all else 0

    def _wanted(self, used: dict[int, list[bool]], group_of: dict[int, int]) -> set[int]:
        """Return the ids of the `OwnedParameter`s to update: this rank's part or another part has a gradient.

        Collective if parameters are sharded over tp or ep.
        """
        local = [
            owned.chunk.slot.has_reduced
            and used[owned.chunk.unit.index][owned.index]
            and id(owned.parameter) in group_of
            for owned in self.owned
        ]
        # All owners of parts have to take part in the same steps, so a gradient for one part counts for all.
        for name in sorted({axis for owned in self.owned for axis in owned.placement.sharded_axes}):
            sharded = [number for number, owned in enumerate(self.owned) if name in owned.placement.sharded_axes]
            device = self.chunks[0].unit.full.device
            flags = torch.tensor([float(local[number]) for number in sharded], device=device)
            self._axes[name].all_reduce(flags)
            for number, flag in zip(sharded, flags.tolist(), strict=True):
                local[number] = flag > 0
        return {id(owned) for owned, wants in zip(self.owned, local, strict=True) if wants}

    def _assemble(self, owned: OwnedParameter, part: torch.Tensor) -> torch.Tensor:
        """Return the full tensor, given this rank's part of it. Collective over the owners of the parts."""
        if owned.placement.is_full:
            return part
        device = owned.chunk.unit.full.device  # the mesh axes communicate on this device, whichever tier the part is on
        return gather_full(part.to(device), owned.placement, self._axes).to(part.device)

    def _join_states(self, owned: OwnedParameter) -> None:
        """Replace the states of this rank's part by full states. Collective over the owners of the parts."""
        placement = owned.placement
        if placement.is_full:
            return
        state = self._inner.state.get(owned.tensor, {})
        for key, value in state.items():
            if _is_part(key, value, placement):
                state[key] = self._assemble(owned, value)

    def _part(self, owned: OwnedParameter) -> None:
        """Replace the updated weight and its states by this rank's part of them."""
        placement = owned.placement
        owned.tensor.data = select_local_shard(owned.tensor.data.view(placement.global_shape), placement)
        state = self._inner.state.get(owned.tensor, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == placement.global_shape:
                state[key] = select_local_shard(value, placement)

    def _assign(self, chunks: list[UpdateChunk]) -> list[OwnedParameter]:
        """Assign an owner to each parameter, see `choose_owners`.

        Returns:
            All parameters of `chunks`, without empty ones, in model order.
        """
        loads = {id(dp_group): [0] * dp_group.group.size for dp_group in self._dp_groups}
        for before in self.owned:
            loads[id(before.chunk.unit.dp_group)][before.owner] += get_global_numel(before.parameter)
        owners = choose_owners([chunk.unit for chunk in chunks], loads, shards_states=not self._whole)
        owned = []
        for chunk, of_unit in zip(chunks, owners, strict=True):
            for index, owner in enumerate(of_unit):
                if get_global_numel(chunk.unit.parameters[index]):
                    tensor = nn.Parameter(torch.empty(0, dtype=chunk.state_dtype, device=chunk.device))
                    owned.append(OwnedParameter(chunk, index, owner, tensor))
        return owned

    def _spans(self, owned: OwnedParameter) -> list[tuple[int, int, int, int]]:
        """Return the fragments of a parameter: `(rank's index in the group, start, stop, offset in its state span)`.

        `start` and `stop` count from the first element of the parameter, or of its local part.
        """
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
        """Send fragments of `todo` to their owners, and return the flat tensors of the parameters that this
        rank owns. Collective.

        Args:
            gradient: collect gradients instead of master weights.

        Returns:
            Tensors `[elements of the parameter]` in the chunk's state dtype, by id of the `OwnedParameter`.
        """
        result: dict[int, torch.Tensor] = {}
        moves = [_PointToPointMoves(dp_group) for dp_group in self._dp_groups]
        for owned in todo:
            master, move, me = owned.chunk.values(), self._move_of(owned, moves), owned.group.index
            source = owned.chunk.gradient if gradient else master
            assert source is not None
            dtype, numel = owned.chunk.state_dtype, owned.chunk.unit.layout.numels[owned.index]
            full = master.new_empty(numel, dtype=dtype) if owned.is_local else None
            if full is not None:
                result[id(owned)] = full
            for rank, start, stop, offset in self._spans(owned):
                if rank == me and full is not None:
                    full[start:stop].copy_(source.narrow(0, offset, stop - start))
                elif rank == me:
                    move.sends.append((owned.owner, source.narrow(0, offset, stop - start).to(dtype)))
                elif full is not None:
                    move.receives.append((rank, full[start:stop]))
        # All transfers of a group start at once: in sequence, ranks that send to each other would deadlock.
        for move in moves:
            move.make()
        return result

    def _return(self, todo: list[OwnedParameter], values: dict[int, torch.Tensor]) -> None:
        """Send the fragments of updated parameters to the ranks whose state spans contain them. Collective."""
        moves = [_PointToPointMoves(dp_group) for dp_group in self._dp_groups]
        for owned in todo:
            master, move, me = owned.chunk.values(), self._move_of(owned, moves), owned.group.index
            # Read `owned.tensor`, not `values`: the optimizer may have replaced the tensor's data instead of
            # writing to it.
            full = owned.tensor.detach().reshape(-1) if id(owned) in values else None
            for rank, start, stop, offset in self._spans(owned):
                if rank == me and full is not None:
                    master.narrow(0, offset, stop - start).copy_(full[start:stop])
                elif rank == me:
                    move.receives.append((owned.owner, master.narrow(0, offset, stop - start)))
                elif full is not None:
                    move.sends.append((rank, full[start:stop].to(master.dtype)))
        for move in moves:
            move.make()

    def _move_of(self, owned: OwnedParameter, moves: list[_PointToPointMoves]) -> _PointToPointMoves:
        """Return the transfers of the parameter's data-parallel group."""
        return next(move for move in moves if move.dp_group is owned.chunk.unit.dp_group)


def choose_owners(units: Sequence[Unit], loads: dict[int, list[int]], *, shards_states: bool) -> list[list[int]]:
    """Choose the owner of each parameter, the largest parameter first: the rank with the fewest elements so far.

    Args:
        loads: elements that each rank owns, by id of the data-parallel group; elements of `units` are added in place.
        shards_states: False where every rank owns all parameters.

    Returns:
        For each unit and each of its parameters the owner, as an index in the unit's group.
    """
    parameters = [
        (get_global_numel(parameter), number, index)  # full size: gives all tp shards of a parameter the same owner
        for number, unit in enumerate(units)
        for index, parameter in enumerate(unit.parameters)
    ]
    owners = [[0] * len(unit.parameters) for unit in units]
    for numel, number, index in sorted(parameters, key=lambda entry: (-entry[0], entry[1], entry[2])):
        dp_group = units[number].dp_group
        load = loads[id(dp_group)]
        owner = load.index(min(load)) if shards_states else dp_group.group.index
        load[owner] += numel
        owners[number][index] = owner
    return owners


@dataclass(eq=False)
class _PointToPointMoves:
    """Point-to-point transfers between the ranks of a group, all started together.

    Attributes:
        sends: for each message, its destination (an index in the group) and the tensor to send.
        receives: for each message, its source (an index in the group) and the tensor to receive into.
    """

    dp_group: DataParallelGroup
    sends: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    receives: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    def make(self) -> None:
        """Run all transfers, and count the received bytes as traffic of the step."""
        moved = exchange_tensors(self.dp_group.group, self.sends, self.receives)
        self.dp_group.transport.traffic.bytes_moved["whole"] += moved


def _is_part(key: str, value: Any, placement: Placement) -> bool:
    """Return True if a state of a sharded parameter has one value for each element of this rank's part."""
    shaped = isinstance(value, torch.Tensor) and value.dim() > 0 and key not in SCALAR_STATES
    return shaped and tuple(value.shape) == placement.local_shape


def _moved(state: dict[str, Any], owned: OwnedParameter, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the existing states of a parameter, on the device of the update and in the dtype of `state_dtype`.

    Scalar states such as `step` are unchanged.
    """
    moved = dict(state)
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or key in SCALAR_STATES:
            continue
        if value.shape == owned.parameter.shape:
            value = value.view(owned.stepped_shape)
            moved[key] = value.to(owned.chunk.device, state_dtype(optimizer, value.dtype, owned.chunk))
        elif value.dim() > 0:
            moved[key] = value.to(owned.chunk.device)
    return moved
