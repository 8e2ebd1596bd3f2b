"""A unit: parameters that are gathered, reduced and stepped together, as views into one flat buffer."""

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
    """Where the whole parameters of a unit are."""

    SHARDED = "released"
    UNSHARDING = "coming"
    UNSHARDED = "present"


class Unit:
    """Parameters, their layout, and the flat tensors that hold them.

    [Note: released parameters] At stage 3 `full` exists only while a block that uses the unit runs. On shared memory
    it is one buffer for all ranks, each owning its cut, and a gather only waits until the owners have updated.
    Elsewhere (a wire, or parameters that rest away from the device) its memory is vacated and occupied again: views
    that autograd saved alias it, so they hold the right values again after the gather before their backward; it is
    never lent to another unit. A released parameter keeps its shape but all its elements are one NaN (see access.py),
    so that no use of it can go unnoticed.

    Attributes:
        full: `[layout.padded]` in the compute dtype; parameters are views of it while present.
        frees: releasing gives memory back (else only the names go).
        lowered: its gradients travel in `Settings.lowered_wire`.
        family: the ranks that it is cut and reduced over.
        placements: of each parameter, what of the whole one lies here.
        sums: groups over which its reduced cut is added up besides.
        speaks: of the ranks beside each other that have the same of it, this one counts where each element counts once.
        share: factor of the squares of its elements in the norm, see `family.share`.
        rests: this rank's cut of the parameters where `full` is freed; else the cut is that of `full`.
        home: of the parameters between uses.
        state_home: of master weights and optimizer states.
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
        self.users = 0  # blocks now between their gather and their release
        self.keep_unsharded = False  # a graph of gradients may come back to it at any time
        self.state_start, self.state_stop = 0, layout.padded
        self.tier, self.state_tier = tier, state_tier
        self.shard_slot: Slot | None = None
        self.secondary_shard: torch.Tensor | None = None
        self.data_snapshots: dict[
            int, torch.Tensor
        ] = {}  # by parameter, values when a script read `.data` since the gather
        self.lost_edit_name = ""  # a parameter that was changed through `.data` before it was released
        self.privately_held: set[int] = set()  # parameters that hold a private copy inside GatheredParameters
        self.unshard_for_current_block: Callable[[Unit], bool] | None = (
            None  # set by the runtime: gather it for whoever runs now
        )
        self.order_pending: Callable[[Pending], Pending] = lambda pending: pending  # set by the order
        self.unsharded_for_peers = False  # gathered before anybody here needed it
        self._pending: Pending = DONE
        self._secondary_valid = False  # the second copy is of the present values
        self._all_ranks_gathered = True  # on all ranks, since the values changed
        self.update_count = 0  # times that the cut was given new values

    @property
    def transport(self) -> Transport:
        """Over the ranks that it is cut over."""
        return self.dp_group.transport

    @property
    def numel(self) -> int:
        """Elements of the parameters, padding left out."""
        return self.layout.numel

    @property
    def nbytes(self) -> int:
        """Bytes of `full`."""
        return self.layout.padded * self.dtype.itemsize

    @property
    def kind(self) -> PlacementKey:
        """What decides who else has it, and who reduces it."""
        return self.placements[0].key

    def buffer_request(self) -> BufferRequest:
        """The buffer to allocate for `full`."""
        away = self.reshards and self.tier is not Tier.DEVICE
        return BufferRequest(self.layout.padded, self.dtype, shared=self.reshards and not away, transient=self.reshards)

    def bind(
        self,
        buffer: TransportBuffer,
        ledger: DeviceMemoryLedger,
        make_shard_slot: Callable[[Unit, int], Slot],
    ) -> None:
        """Take `buffer` for `full`; its content is set by `views` and `settle_in` afterwards.

        Args:
            rests: makes a slot of so many elements for a cut whose `full` is freed.
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
        """Take another `buffer` for `full`, with the same values; of a unit that is never released."""
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
        """This rank's cut of `full`, over the transport's group."""
        return local_shard(self.full, self.transport.group.index, self.transport.group.size)

    def read_local_shard(self) -> torch.Tensor:
        """This rank's cut of the parameters in memory; change it and give it to `write_cut`."""
        return self.shard_slot.read() if self.shard_slot is not None else self.local_shard

    def write_local_shard(self, values: torch.Tensor) -> None:
        """Put what `read_cut` gave back."""
        if self.shard_slot is not None:
            self.shard_slot.write(values)

    def views(self) -> list[torch.Tensor]:
        """The parameters' places in `full`, shaped; valid while present."""
        return self._views

    def store_local_shard(self, values: torch.Tensor) -> None:
        """Take this rank's cut, in the compute dtype and on the device, to where it rests while `full` is freed."""
        assert self.shard_slot is not None
        self.shard_slot.put(values).wait()

    def finish_init(self) -> None:
        """After the cut was filled for the first time: point the parameters, let the rest go."""
        self.point()
        if self.reshards:
            if not self.frees_memory:
                self.transport.publish(self.buffer)
            self.reshard()

    def read_ahead(self) -> bool:
        """Start to read this rank's cut from disk, for the next gather; False if there is no room for it."""
        return self.shard_slot is None or self.shard_slot.prefetch()

    def unshard(self, *, backward: bool = False) -> None:
        """Start to make the parameters present; `await_present` finishes that."""
        if self.shard_state is ShardState.SHARDED:
            self._start_unshard(backward=backward)

    def join_unshard(self, *, backward: bool = False) -> None:
        """Take part in a gather that some rank needs, whether the parameters are present here or not."""
        if self.shard_state is not ShardState.SHARDED:
            self.wait_for_unshard()
        self._start_unshard(backward=backward)

    def _start_unshard(self, *, backward: bool) -> None:
        here = self.shard_state is ShardState.UNSHARDED  # then peers' cuts come once more, the same as they are
        self._pending = self._start_all_gather(here, backward=backward)
        if not here:  # not before: where there is no memory for it, it is as it was
            self.shard_state = ShardState.UNSHARDING

    def _start_all_gather(self, is_unsharded: bool, *, backward: bool) -> Pending:
        if self.shard_slot is None:
            return self.transport.all_gather(self.buffer, elements=self.numel)
        if not is_unsharded:
            self._account_memory(self.nbytes)
            self.transport.allocate_memory(self.buffer)
        # whether nearer ranks are asked must be the same on all, whatever each of them released
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
        """Gather if nobody has, wait, and point the parameters at their values."""
        if self.shard_state is ShardState.UNSHARDED:
            return
        self.unshard(backward=backward)
        with WaitScope("gather", self.names):
            self._pending.wait()
        self._pending = DONE
        self.point()

    def reshard(self, *, stale: bool = False) -> None:
        """Release: the parameters lose their values, and the memory of `full` goes back.

        Args:
            stale: the cut at rest has newer values than `full`, so that no second copy may be taken from it.
        """
        self._pending.wait()
        self._pending, self.unsharded_for_peers = DONE, False
        if self._regather is not None and self.secondary_shard is not None and not self._secondary_valid and not stale:
            near = self._regather.group
            self.secondary_shard.copy_(local_shard(self.full, near.index, near.size))
            self._secondary_valid = True
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
        """A script reads `.data` of a gathered parameter: find out, when it is released, whether it changed values."""
        if (
            self.shard_state is ShardState.UNSHARDED
            and index not in self.privately_held
            and index not in self.data_snapshots
        ):
            self.data_snapshots[index] = self._views[index].clone()

    def _record_data_edits(self) -> None:
        """Note parameters that were changed through `.data`. Their versions stay: a backward would refuse them."""
        for index, before in self.data_snapshots.items():
            if not torch.equal(before, self._views[index]):
                self.lost_edit_name = self.lost_edit_name or self.names[index]
        self.data_snapshots.clear()

    def mark_updated(self) -> None:
        """The cut has new values, which peers may gather."""
        self.update_count += 1
        self._secondary_valid = self._all_ranks_gathered = False
        if self.reshards and not self.frees_memory:
            self.transport.publish(self.buffer)

    def _account_memory(self, nbytes: int) -> None:
        self._ledger.set_held_bytes(f"parameters of {self.names[0]}", nbytes)

    def gather_parameter(self, parameter: nn.Parameter, together: Sequence[torch.Tensor]) -> bool:
        """As `Keeper`: inside a forward, and from then on tied to the block that runs."""
        return self.unshard_for_current_block is not None and self.unshard_for_current_block(self)

    def name_of(self, parameter: nn.Parameter) -> str:
        """As `Keeper`."""
        return next((n for n, p in zip(self.names, self.parameters, strict=True) if p is parameter), "?")

    def point(self) -> None:
        """Make the parameters views of `full`, which has their values."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if index in self.privately_held:
                continue
            if isinstance(parameter, ShardedParameter):
                mark_unsharded(parameter)
            put_data(parameter, view)
        self.shard_state = ShardState.UNSHARDED

    def recapture_parameters(self) -> None:
        """Copy parameters that were given other memory into their places, and point them there again.

        Raises:
            ModelError: one was resized.
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
        """Raises ModelError where a parameter, or its gradient, has another shape than it had."""
        if shape != self.shapes[index]:
            raise ModelError(
                f"{self.names[index]!r} had shape {tuple(self.shapes[index])} at initialize and has {tuple(shape)} "
                "now; destroy() the engine before a parameter is resized, and initialize again"
            )

    def pieces(self) -> Iterator[LayoutPiece]:
        """This rank's parts of the parameters, within its state span."""
        return self.layout.pieces(self.state_start, self.state_stop)

    def names_in(self, start: int, stop: int) -> Iterator[str]:
        """Names of the parameters in elements `[start, stop)` of the whole unit, quoted."""
        return (repr(self.names[piece.index]) for piece in self.layout.pieces(start, stop))

    def _names_in_shard(self, start: int, stop: int) -> Iterator[str]:
        begin, _ = self.layout.shard_range(self.transport.group.index, self.transport.group.size)
        return self.names_in(begin + start, begin + stop)

    def local_span(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's state span of a flat tensor over the whole unit."""
        return flat[self.state_start : self.state_stop]

    def parameter_view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """The place of one parameter in a flat tensor over the whole unit, shaped."""
        return flat.narrow(0, self.layout.offsets[index], self.layout.numels[index]).view(self.shapes[index])


def expert_data_group(units: Sequence[Unit]) -> RankGroup | None:
    """The data ranks of units of experts, who read and set them by themselves; None where other units are among them,
    whose ranks are all."""
    return units[0].dp_group.mesh.data if units and all(unit.kind.is_expert for unit in units) else None
