"""Parameters that are all-gathered, reduced and updated together, as views of one flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum

import torch
from torch import nn

from windlass.base.collective_activity import WaitScope
from windlass.base.device_memory import DeviceMemoryLedger
from windlass.base.errors import ModelError
from windlass.base.pending import DONE, Pending
from windlass.comm.rank_group import RankGroup
from windlass.comm.transport import BufferRequest, Transport, TransportBuffer, local_shard
from windlass.parallel.placement import PlacementKey, get_placement
from windlass.storage.slot import Slot, Tier
from windlass.zero.core.dp_group import DataParallelGroup
from windlass.zero.core.sharded_parameter import ShardedParameter, mark_sharded, mark_unsharded, put_data, raw_data
from windlass.zero.core.unit_layout import LayoutPiece, UnitLayout
from windlass.zero.core.unit_partition import Block, UnitPlan


class ShardState(Enum):
    """State of a unit's full parameters on this rank."""

    SHARDED = "released"
    UNSHARDING = "coming"
    UNSHARDED = "present"


class Unit:
    """Parameters, their layout, and the flat tensors that hold them.

    [Note: released parameters] At stage 3, `full` holds values only while a block that uses the unit runs. On
    shared
    memory, `full` is one buffer that all ranks map, each rank writes its own shard, and an all-gather only waits
    until all owners have updated. On other transports, or when parameters are offloaded, the storage of `full`
    is freed and allocated again. Views that autograd saved alias this storage, so they have the right values
    again after the all-gather before their backward. For this reason the storage is never lent to another unit.
    A sharded parameter keeps its shape but all its elements are one NaN (see sharded_parameter.py), so that no
    use of it goes unnoticed.

    Attributes:
        full: `[layout.padded]` in the param_dtype; the parameters are views of it while unsharded.
        frees_memory: True if resharding frees the memory of `full`; otherwise it only invalidates the
            parameters.
        lowered: True if the unit's gradients are reduced in `lowered_reduce_dtype`.
        dp_group: the ranks over which the unit is sharded and reduced.
        placements: for each parameter, the part of the full parameter that lies on this rank.
        extra_reduce_groups: further groups over which the reduced shard is summed.
        is_primary_replica: True on the one rank whose copy is counted when replicas are summed.
        norm_weight: factor of the squares of the unit's elements in the gradient norm.
        shard_slot: this rank's shard of the parameters if `full` is freed; None if the shard is a view of
            `full`.
        tier: tier of the parameters while they are sharded.
        state_tier: tier of master weights and optimizer states.
    """

    def __init__(
        self,
        index: int,
        plan: UnitPlan,
        layout: UnitLayout,
        param_dtype: torch.dtype,
        dp_group: DataParallelGroup,
        *,
        reshards: bool,
        tier: Tier = Tier.DEVICE,
        state_tier: Tier = Tier.DEVICE,
    ) -> None:
        self.index, self.names, self.parameters = index, plan.names, plan.parameters
        self.blocks: list[Block] = list(plan.blocks)
        self.layout, self.dtype, self.trainable, self.persistent = layout, param_dtype, plan.trainable, plan.persistent
        self.lowered = plan.lowered
        self.shapes = [p.shape for p in plan.parameters]
        self.dp_group, self.placements = dp_group, [get_placement(p) for p in plan.parameters]
        self.extra_reduce_groups: list[RankGroup] = []
        self.norm_weight = 1.0
        self.is_primary_replica = True
        self.reshards = reshards
        self.shard_state = ShardState.UNSHARDED
        self.users = 0  # block calls between their unshard and their reshard
        self.keep_unsharded = False  # a later double backward may read the values at any time
        self.state_start, self.state_stop = 0, layout.padded
        self.tier, self.state_tier = tier, state_tier
        self.shard_slot: Slot | None = None
        self.secondary_shard: torch.Tensor | None = None
        self.data_snapshots: dict[
            int, torch.Tensor
        ] = {}  # by parameter index: values when a script read `.data`, since the unshard
        self.lost_edit_name = ""  # a parameter that was changed through `.data` before the reshard
        self.privately_held: set[int] = set()  # parameters that hold a private copy inside GatheredParameters
        self.unshard_for_current_block: Callable[[Unit], bool] | None = (
            None  # set by the runtime: unshard for the block that runs now
        )
        self.order_pending: Callable[[Pending], Pending] = lambda pending: pending  # set by the scheduler
        self.unsharded_for_peers = False  # unsharded only because another rank needed it
        self._pending: Pending = DONE
        self._secondary_valid = False  # the secondary shard holds the current values
        self._all_ranks_gathered = True  # all ranks have gathered since the values changed
        self.update_count = 0  # number of times that the shard got new values

    @property
    def transport(self) -> Transport:
        """Transport of the data-parallel group."""
        return self.dp_group.transport

    @property
    def numel(self) -> int:
        """Number of elements of the parameters, without padding."""
        return self.layout.numel

    @property
    def nbytes(self) -> int:
        """Bytes of `full`."""
        return self.layout.padded * self.dtype.itemsize

    @property
    def kind(self) -> PlacementKey:
        """Key that determines which ranks hold copies of the unit and which ranks reduce it."""
        return self.placements[0].key

    def buffer_request(self) -> BufferRequest:
        """Return the request for the buffer of `full`."""
        away = self.reshards and self.tier is not Tier.DEVICE
        return BufferRequest(self.layout.padded, self.dtype, shared=self.reshards and not away, transient=self.reshards)

    def bind(
        self,
        buffer: TransportBuffer,
        ledger: DeviceMemoryLedger,
        make_shard_slot: Callable[[Unit, int], Slot],
    ) -> None:
        """Use `buffer` as `full`. Its content is set afterwards, through `views` and `finish_init`.

        Args:
            make_shard_slot: returns a slot with the given number of elements, for the shard of a unit whose
                `full` is freed.
        """
        self.buffer, self.full, self._ledger = buffer, buffer.local, ledger
        self.frees_memory = self.reshards and not buffer.shared
        self._account_memory(self.nbytes)
        if self.frees_memory:
            self.transport.allocate_memory(buffer)
            self.shard_slot = make_shard_slot(self, self.local_shard.numel())
            self.shard_slot.set_content_description(self._names_in_shard)
        self._make_views()
        self._regather = self.dp_group.secondary_transport if self.frees_memory else None
        if self._regather is not None:
            near = self._regather.group
            self.secondary_shard = torch.empty_like(local_shard(self.full, near.index, near.size))

    def move_to(self, buffer: TransportBuffer) -> None:
        """Move `full` and its values to another `buffer`. Only for a unit that is never resharded."""
        self.recapture_parameters()
        buffer.local.copy_(self.full)
        self.buffer, self.full = buffer, buffer.local
        self._make_views()
        self.point()

    def _make_views(self) -> None:
        self._views = [
            self.full.narrow(0, offset, numel).view(shape)
            for offset, numel, shape in zip(self.layout.offsets, self.layout.numels, self.shapes, strict=True)
        ]

    @property
    def local_shard(self) -> torch.Tensor:
        """This rank's shard of `full`, over the transport's group."""
        return local_shard(self.full, self.transport.group.index, self.transport.group.size)

    def read_local_shard(self) -> torch.Tensor:
        """Return this rank's shard of the parameters in memory. Pass the changed shard to `write_local_shard`."""
        return self.shard_slot.read() if self.shard_slot is not None else self.local_shard

    def write_local_shard(self, values: torch.Tensor) -> None:
        """Store the shard that `read_local_shard` returned."""
        if self.shard_slot is not None:
            self.shard_slot.write(values)

    def views(self) -> list[torch.Tensor]:
        """Return the views of the parameters in `full`, in their shapes. Their values are valid while the unit is
        unsharded.
        """
        return self._views

    def store_local_shard(self, values: torch.Tensor) -> None:
        """Write this rank's shard (in the param_dtype, on the device) to the tier that holds it while `full` is
        freed.
        """
        assert self.shard_slot is not None
        self.shard_slot.put(values).wait()

    def finish_init(self) -> None:
        """Finish the initialization after the shard was first filled: point the parameters at `full` and reshard."""
        self.point()
        if self.reshards:
            if not self.frees_memory:
                self.transport.publish(self.buffer)
            self.reshard()

    def read_ahead(self) -> bool:
        """Start to read this rank's shard from disk for the next all-gather. Return False if no buffer is free."""
        return self.shard_slot is None or self.shard_slot.prefetch()

    def unshard(self, *, backward: bool = False) -> None:
        """Start to all-gather the parameters. `wait_for_unshard` completes it."""
        if self.shard_state is ShardState.SHARDED:
            self._start_unshard(backward=backward)

    def join_unshard(self, *, backward: bool = False) -> None:
        """Join an all-gather that some rank needs, even if the parameters are already unsharded here."""
        if self.shard_state is not ShardState.SHARDED:
            self.wait_for_unshard()
        self._start_unshard(backward=backward)

    def _start_unshard(self, *, backward: bool) -> None:
        here = self.shard_state is ShardState.UNSHARDED  # then the all-gather writes the same values again
        self._pending = self._start_all_gather(here, backward=backward)
        if not here:  # set only now: a failed allocation leaves the state unchanged
            self.shard_state = ShardState.UNSHARDING

    def _start_all_gather(self, is_unsharded: bool, *, backward: bool) -> Pending:
        if self.shard_slot is None:
            return self.transport.all_gather(self.buffer, elements=self.numel)
        if not is_unsharded:
            self._account_memory(self.nbytes)
            self.transport.allocate_memory(self.buffer)
        # All ranks must choose the same group for the all-gather, so the choice does not depend on local reshards.
        if backward and self._regather is not None and self.secondary_shard is not None and self._all_ranks_gathered:
            if not is_unsharded:
                group = self._regather.group
                local_shard(self.full, group.index, group.size).copy_(self.secondary_shard)
            return self.order_pending(self._regather.all_gather(self.buffer, elements=self.numel))
        self._all_ranks_gathered = True
        fetched = DONE if is_unsharded else self.shard_slot.fetch(self.local_shard)
        with WaitScope("gather", self.names):
            return self.order_pending(self.transport.all_gather(self.buffer, elements=self.numel, ready=fetched))

    def wait_for_unshard(self, *, backward: bool = False) -> None:
        """All-gather the parameters if that has not started, wait, and point the parameters at their values."""
        if self.shard_state is ShardState.UNSHARDED:
            return
        self.unshard(backward=backward)
        with WaitScope("gather", self.names):
            self._pending.wait()
        self._pending = DONE
        self.point()

    def reshard(self, *, stale: bool = False) -> None:
        """Invalidate the parameters and free the memory of `full`.

        Args:
            stale: the stored shard has newer values than `full`, so the secondary shard must not be copied from
                `full`.
        """
        self._pending.wait()
        self._pending, self.unsharded_for_peers = DONE, False
        if self._regather is not None and self.secondary_shard is not None and not self._secondary_valid and not stale:
            near = self._regather.group
            self.secondary_shard.copy_(local_shard(self.full, near.index, near.size))
            self._secondary_valid = True
        # Edits through `.data` are lost with the memory, so detect them before it is freed.
        if self.data_snapshots:
            self._record_data_edits()
        for index, parameter in enumerate(self.parameters):
            if index not in self.privately_held:
                mark_sharded(parameter, self)
        self.shard_state = ShardState.SHARDED
        if self.frees_memory:
            self.transport.free_memory(self.buffer)
            self._account_memory(0)

    def snapshot_data(self, index: int) -> None:
        """Copy an unsharded parameter whose `.data` a script reads, to detect at the reshard whether the script
        changed it.
        """
        if (
            self.shard_state is ShardState.UNSHARDED
            and index not in self.privately_held
            and index not in self.data_snapshots
        ):
            self.data_snapshots[index] = self._views[index].clone()

    def _record_data_edits(self) -> None:
        """Record the first parameter that was changed through `.data`. Versions are not increased, because a
        backward would then
        raise.
        """
        for index, before in self.data_snapshots.items():
            if not torch.equal(before, self._views[index]):
                self.lost_edit_name = self.lost_edit_name or self.names[index]
        self.data_snapshots.clear()

    def mark_updated(self) -> None:
        """Record that the shard has new values, and publish them on shared memory."""
        self.update_count += 1
        self._secondary_valid = self._all_ranks_gathered = False
        if self.reshards and not self.frees_memory:
            self.transport.publish(self.buffer)

    def _account_memory(self, nbytes: int) -> None:
        self._ledger.set_held_bytes(f"parameters of {self.names[0]}", nbytes)

    def gather_parameter(self, parameter: nn.Parameter, together: Sequence[torch.Tensor]) -> bool:
        """Unshard for the block that runs now and add the unit to that block (see `GatherHandler`). Return False
        outside a forward.
        """
        return self.unshard_for_current_block is not None and self.unshard_for_current_block(self)

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name of `parameter` for error messages."""
        return next((n for n, p in zip(self.names, self.parameters, strict=True) if p is parameter), "?")

    def point(self) -> None:
        """Make the parameters views of `full`, and mark the unit unsharded."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if index in self.privately_held:
                continue
            if isinstance(parameter, ShardedParameter):
                mark_unsharded(parameter)
            put_data(parameter, view)
        self.shard_state = ShardState.UNSHARDED

    def recapture_parameters(self) -> None:
        """Copy the values of parameters that were moved to other memory into `full`, and make them views of `full`
        again.

        Raises:
            ModelError: a parameter was resized.
        """
        for index, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if not view.numel() or parameter.data_ptr() == view.data_ptr():
                continue
            self.require_shape(index, parameter.shape)
            with torch.no_grad():
                view.copy_(raw_data(parameter))
            put_data(parameter, view)
            torch.autograd.graph.increment_version(parameter)

    def require_shape(self, index: int, shape: torch.Size) -> None:
        """Raise ModelError if a parameter, or its gradient, does not have its original shape."""
        if shape != self.shapes[index]:
            raise ModelError(
                f"{self.names[index]!r} had shape {tuple(self.shapes[index])} at initialize and has {tuple(shape)} "
                "now; destroy() the engine before a parameter is resized, and initialize again"
            )

    def pieces(self) -> Iterator[LayoutPiece]:
        """Yield this rank's fragments of the parameters, within its state span."""
        return self.layout.pieces(self.state_start, self.state_stop)

    def names_in(self, start: int, stop: int) -> Iterator[str]:
        """Return the quoted names of the parameters in elements `[start, stop)` of the unit."""
        return (repr(self.names[piece.index]) for piece in self.layout.pieces(start, stop))

    def _names_in_shard(self, start: int, stop: int) -> Iterator[str]:
        begin, _ = self.layout.shard_range(self.transport.group.index, self.transport.group.size)
        return self.names_in(begin + start, begin + stop)

    def local_span(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's state span of a flat tensor over the unit."""
        return flat[self.state_start : self.state_stop]

    def parameter_view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Return the view of one parameter in a flat tensor over the unit, in the parameter's shape."""
        return flat.narrow(0, self.layout.offsets[index], self.layout.numels[index]).view(self.shapes[index])


def expert_data_group(units: Sequence[Unit]) -> RankGroup | None:
    """Return the data-parallel ranks of expert units, which read and set their experts independently of other
    ranks.
    Return None if `units` is empty or contains other units, because these involve all ranks.
    """
    return units[0].dp_group.mesh.data if units and all(unit.kind.is_expert for unit in units) else None
