"""Unit: parameters that are gathered, reduced and updated together, as views of one flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import nn

from windlass.base import trace_ranges
from windlass.base.collective_activity import WaitScope
from windlass.base.device_memory import DeviceMemoryLedger
from windlass.base.errors import ModelError
from windlass.base.pending import DONE, Pending
from windlass.comm.rank_group import RankGroup
from windlass.comm.transport import BufferRequest, Transport, TransportBuffer, local_shard
from windlass.parallel.placement import PlacementKey, get_placement
from windlass.storage.slot import Slot, Tier
from windlass.zero.core.dp_group import DataParallelGroup
from windlass.zero.core.sharded_parameter import (
    ShardedParameter,
    mark_freed,
    mark_sharded,
    mark_unsharded,
    put_data,
    raw_data,
    unmark_freed,
)
from windlass.zero.core.unit_layout import LayoutPiece, UnitLayout
from windlass.zero.core.unit_plan import Block, UnitPlan


class ShardState(Enum):
    """State of the full parameters of a unit on this rank."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


@dataclass(frozen=True)
class UnitCallbacks:
    """Callables of the model that its units call.

    Attributes:
        unshard_for_current_block: Unshards a unit until the end of the running block. Returns False if no block runs
            forward.
        enqueue: Takes an all-gather that was just started, and wraps it so that it finishes after all earlier
            collectives.
    """

    unshard_for_current_block: Callable[[Unit], bool]
    enqueue: Callable[[Pending], Pending]


class Unit:
    """Parameters of one unit, their layout, and the flat tensors that hold them.

    [Note: sharded parameters] At stage 3 parameters that are not persistent have values only while a block that uses
    the unit runs. On shared memory `full` is one buffer for all ranks: each rank owns its shard, and a gather only
    waits until the owners have published their updates. On other transports, or if the parameters are offloaded, the
    memory of `full` is freed and allocated again under the same tensor object. Views that autograd saved alias `full`,
    so they hold the right values again after the gather before their backward. No other unit uses the tensor `full`. A
    sharded parameter keeps its shape, but all its elements are the same NaN in memory (see sharded_parameter.py), so
    that every accidental use is visible.

    Attributes:
        full: `[layout.padded]` in `dtype`. Parameters are views of it while the unit is unsharded.
        frees_memory: Resharding frees the memory of `full`. If False, resharding only marks the parameters as sharded.
        lowered: Gradients are sent in `ZeroSettings.lowered_reduce_dtype`.
        unstepped: No parameter is in a group of the optimizer now, so a step leaves the gradient: see [Note: gradients
            that stay].
        outside: Indices of trained parameters that were in no group of the optimizer in the last step.
        dp_group: Ranks over which the unit is sharded and reduced.
        placements: Placement of each parameter: the part of the full parameter that this rank holds.
        extra_reduce_groups: Further groups over which the reduced gradient shard is summed.
        is_primary_replica: True on the first of the tensor-parallel ranks and pipeline stages that hold the unit; only
            its copy is saved and hashed.
        norm_weight: Factor for the squares of the unit's gradient elements in the gradient norm.
        state_start, state_stop: State span: range of `full` whose master weights and optimizer states this rank keeps.
        shard_slot: This rank's shard of the parameters if `frees_memory`; else None, and the shard is part of `full`.
        tier: Tier of the parameters while they are sharded.
        state_tier: Tier of master weights and optimizer states.
        gradient_tier: Tier of the reduced gradient.
        gather_codec: Name of the lossy codec of the all-gathers of `full`; None: the gathered values are exact. Always
            None for a unit that is never resharded.
    """

    def __init__(
        self,
        index: int,
        plan: UnitPlan,
        layout: UnitLayout,
        param_dtype: torch.dtype,
        dp_group: DataParallelGroup,
        callbacks: UnitCallbacks,
        *,
        reshards: bool,
        tier: Tier = Tier.DEVICE,
        state_tier: Tier = Tier.DEVICE,
        gather_codec: str | None = None,
    ) -> None:
        self.index, self.names, self.parameters = index, plan.names, plan.parameters
        self._callbacks = callbacks
        self.blocks: list[Block] = list(plan.blocks)
        self.layout, self.dtype, self.trainable, self.persistent = layout, param_dtype, plan.trainable, plan.persistent
        self.lowered, self.unstepped = plan.lowered, plan.unstepped
        self.outside: frozenset[int] = frozenset()
        self.shapes = [p.shape for p in plan.parameters]
        self.dp_group, self.placements = dp_group, [get_placement(p) for p in plan.parameters]
        self.extra_reduce_groups: list[RankGroup] = []
        self.norm_weight = 1.0
        self.is_primary_replica = True
        self.reshards = reshards
        self.shard_state = ShardState.UNSHARDED
        self.users = 0  # number of running block calls and contexts that keep the unit unsharded
        self.keep_unsharded = False  # True if a later backward may use the parameters at any time
        self.state_start, self.state_stop = 0, layout.padded
        self.tier, self.state_tier, self.gather_codec = tier, state_tier, gather_codec
        self.gradient_tier = Tier.DEVICE
        self.shard_slot: Slot | None = None
        self.secondary_shard: torch.Tensor | None = None
        # Copies of parameters, by index, made when a script first read their `.data` after the unshard.
        self.data_snapshots: dict[int, torch.Tensor] = {}
        self.lost_edit_name = ""  # first parameter that a script changed through `.data` before its reshard
        self.privately_held: set[int] = set()  # indices of parameters with a private copy inside GatheredParameters
        self._freed: set[int] = set()  # indices of parameters marked `FREED`, see [Note: version of freed values]
        self.unsharded_for_peers = False  # True if gathered for peers before this rank needed the unit
        self._pending: Pending = DONE
        self._secondary_valid = False  # True if `secondary_shard` equals the current values
        self._all_ranks_gathered = True  # all ranks have gathered since the values changed
        self.update_count = 0  # number of updates of the local shard

    @property
    def transport(self) -> Transport:
        """Transport over the ranks that the unit is sharded over."""
        return self.dp_group.transport

    @property
    def numel(self) -> int:
        """Number of elements of the parameters, without padding."""
        return self.layout.numel

    @property
    def nbytes(self) -> int:
        """Size of `full` in bytes."""
        return self.layout.padded * self.dtype.itemsize

    @property
    def kind(self) -> PlacementKey:
        """Placement key: determines which ranks hold replicas of the unit and which ranks reduce it."""
        return self.placements[0].key

    def buffer_request(self) -> BufferRequest:
        """Return the request for the buffer that holds `full`."""
        # Offloaded parameters need `full` only while gathered, so it does not go to memory shared by all ranks.
        offloaded = self.reshards and self.tier is not Tier.DEVICE
        return BufferRequest(
            self.layout.padded,
            self.dtype,
            shared=self.reshards and not offloaded,
            transient=self.reshards,
            codec=self.gather_codec,
        )

    def use_gather_codec(self, codec: str | None) -> None:
        """Use another codec for later all-gathers. Called on all ranks, while the unit is sharded."""
        self.gather_codec = self.buffer.codec = codec
        self._secondary_valid = self._all_ranks_gathered = False  # the secondary shard has values of the old codec

    def bind(
        self,
        buffer: TransportBuffer,
        ledger: DeviceMemoryLedger,
        make_shard_slot: Callable[[Unit, int], Slot],
    ) -> None:
        """Use `buffer` as `full`. The caller then stores the values and calls `finish_init`.

        Args:
            make_shard_slot: Returns the storage of the local shard, for a unit that frees `full`. Called with the unit
                and the number of elements.
        """
        self.buffer, self.full, self._ledger = buffer, buffer.local, ledger
        self.frees_memory = self.reshards and not buffer.shared
        # If all ranks share one buffer, each rank counts only its own part.
        self._account_memory(self.nbytes // self.transport.group.size if buffer.shared else self.nbytes)
        if self.frees_memory:
            self.transport.allocate_memory(buffer)
            self.shard_slot = make_shard_slot(self, self.local_shard.numel())
            self.shard_slot.set_content_description(self._names_in_shard)
        self._make_views()
        # A second shard over nearby ranks saves traffic between nodes in the backward, unless `full` is never freed.
        self._regather = self.dp_group.secondary_transport if self.frees_memory else None
        if self._regather is not None:
            near = self._regather.group
            self.secondary_shard = torch.empty_like(local_shard(self.full, near.index, near.size))

    def move_to(self, buffer: TransportBuffer) -> None:
        """Copy the values of `full` to `buffer`, and use `buffer` as `full` from now on.

        Called for units that are never resharded, after `recapture_parameters`.
        """
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
        """This rank's shard of `full`, as a view."""
        return local_shard(self.full, self.transport.group.index, self.transport.group.size)

    def read_local_shard(self) -> torch.Tensor:
        """Return this rank's shard of the parameters: a view of `full`, the tensor of `shard_slot`, or a copy of
        values on NVMe.

        Pass the shard to `write_local_shard` after a change.
        """
        return self.shard_slot.read() if self.shard_slot is not None else self.local_shard

    def write_local_shard(self, values: torch.Tensor) -> None:
        """Store a changed shard that `read_local_shard` returned."""
        if self.shard_slot is not None:
            self.shard_slot.write(values)

    def views(self) -> list[torch.Tensor]:
        """Return the shaped views of the parameters in `full`. Their values are valid while the unit is unsharded."""
        return self._views

    def store_local_shard(self, values: torch.Tensor) -> None:
        """Store `values`, this rank's shard in the parameter dtype on the device, in `shard_slot`.

        Called only if `frees_memory`.
        """
        assert self.shard_slot is not None
        self.shard_slot.put(values).wait()

    def finish_init(self) -> None:
        """Point the parameters at `full`, and reshard if `reshards`. Called once, after the local shard is filled."""
        self.point()
        if self.reshards:
            if not self.frees_memory:
                # Peers may read this rank's part of the shared buffer only after it is published.
                self.transport.publish(self.buffer)
            # `full` has exact values here. With a codec the backward needs those that the forward will gather.
            is_rounded = self.gather_codec is not None
            self._all_ranks_gathered = not is_rounded
            self.reshard(stale=is_rounded)

    def read_ahead(self) -> bool:
        """Start to read this rank's shard from NVMe for the next gather. Return False if the staging pool is full."""
        return self.shard_slot is None or self.shard_slot.prefetch()

    def unshard(self, *, backward: bool = False) -> None:
        """Start to unshard the parameters if they are sharded; `wait_for_unshard` finishes."""
        if self.shard_state is ShardState.SHARDED:
            self.join_unshard(backward=backward)

    def join_unshard(self, *, backward: bool = False) -> None:
        """Take part in a gather that some rank needs, even if the parameters are unsharded on this rank."""
        # This rank joins the collective again, so its own gather in flight has to end first.
        if self.shard_state is not ShardState.SHARDED:
            self.wait_for_unshard()
        here = self.shard_state is ShardState.UNSHARDED  # if so, the gather receives the same values again
        if self.shard_slot is None:
            # Shared buffer: `full` is always allocated; the gather only waits until its owners have published it.
            self._pending = self.transport.all_gather(self.buffer, elements=self.numel)
        else:
            if not here:
                self._account_memory(self.nbytes)
                self.transport.allocate_memory(self.buffer)
            transport, ready = self._choose_gather(self.shard_slot, here, backward=backward)
            # The secondary shard has values that the codec rounded already, so it is gathered without the codec.
            buffer = self.buffer if transport is self.transport else replace(self.buffer, codec=None)
            with WaitScope("gather", self.names):
                gather = transport.all_gather(buffer, elements=self.numel, ready=ready)
            self._pending = self._callbacks.enqueue(gather)
            if trace_ranges.recorder is not None:
                trace_ranges.recorder.begin_flight(("gather", id(self)), "gather", self.names[0])
        if not here:  # set last, so that the state is unchanged if the allocation fails
            self.shard_state = ShardState.UNSHARDING

    def gather_exact(self) -> list[torch.Tensor]:
        """All-gather the shards without a codec, into new memory. The caller syncs the ranks first, so that all join.

        `full` keeps the rounded values, with which a forward or a backward may still compute.

        Returns:
            The shaped views of the parameters in the new memory.
        """
        exact = torch.empty_like(self.full)
        local_shard(exact, self.transport.group.index, self.transport.group.size).copy_(self.read_local_shard())
        with WaitScope("gather", self.names):
            gather = self.transport.all_gather(TransportBuffer(exact), elements=self.numel)
            self._callbacks.enqueue(gather).wait()
        return [self.parameter_view(exact, index) for index in range(len(self.parameters))]

    def _choose_gather(self, slot: Slot, is_unsharded: bool, *, backward: bool) -> tuple[Transport, Pending]:
        """Return the transport of the next all-gather, and the pending copy of this rank's shard into `full`."""
        # All ranks must choose the same group, even if only some of them resharded the unit in between.
        if backward and self._regather is not None and self.secondary_shard is not None and self._all_ranks_gathered:
            if not is_unsharded:
                group = self._regather.group
                # Only nearby ranks gather the secondary shards, which saves traffic between nodes.
                local_shard(self.full, group.index, group.size).copy_(self.secondary_shard)
            return self._regather, DONE
        self._all_ranks_gathered = True
        # An unsharded rank has its shard in `full` already and must not overwrite it while it is in use.
        return self.transport, DONE if is_unsharded else slot.fetch(self.local_shard)

    def wait_for_unshard(self, *, backward: bool = False) -> None:
        """Start to unshard unless started already, wait, and point the parameters at their values."""
        if self.shard_state is ShardState.UNSHARDED:
            return
        self.unshard(backward=backward)
        with WaitScope("gather", self.names):
            self._pending.wait()
        if trace_ranges.recorder is not None:
            trace_ranges.recorder.end_flight(("gather", id(self)))
        self._pending = DONE
        self.point()

    def wait_for_peers(self) -> None:
        """Wait until all peers have published their shards of a shared buffer. The parameters are unsharded."""
        self.join_unshard()
        with WaitScope("gather", self.names):
            self._pending.wait()
        self._pending = DONE

    def reshard(self, *, stale: bool = False) -> None:
        """Reshard: mark the parameters as sharded, and free the memory of `full` if `frees_memory`.

        Args:
            stale: The next gather returns other values than `full` has, so `full` must not be copied to the secondary
                shard.
        """
        # The memory must not be freed while a gather still writes to it.
        self._pending.wait()
        self._pending, self.unsharded_for_peers = DONE, False
        # Copy `full` to the secondary shard before the memory of `full` is freed.
        if self._regather is not None and self.secondary_shard is not None and not self._secondary_valid and not stale:
            near = self._regather.group
            self.secondary_shard.copy_(local_shard(self.full, near.index, near.size))
            self._secondary_valid = True
        # Edits through `.data` are lost with the memory, so detect them before it is freed.
        if self.data_snapshots:
            self._record_data_edits()
        if self.frees_memory:
            self._mark_freed()
        for index, parameter in enumerate(self.parameters):
            if index not in self.privately_held:
                mark_sharded(parameter, self)
        self.shard_state = ShardState.SHARDED
        if self.frees_memory:
            self.transport.free_memory(self.buffer)
            self._account_memory(0)

    def snapshot_data(self, index: int) -> None:
        """Copy the values of an unsharded parameter whose `.data` a script reads, so that a reshard detects changes."""
        if (
            self.shard_state is ShardState.UNSHARDED
            and index not in self.privately_held
            and index not in self.data_snapshots
        ):
            self.data_snapshots[index] = self._views[index].clone()

    def _record_data_edits(self) -> None:
        """Record the first parameter that was changed through `.data`.

        The parameter's version counter is not incremented, because a backward would then reject saved views of it.
        """
        for index, before in self.data_snapshots.items():
            if not torch.equal(before, self._views[index]):
                self.lost_edit_name = self.lost_edit_name or self.names[index]
        self.data_snapshots.clear()

    def mark_updated(self) -> None:
        """Record that the local shard has new values, and publish them to peers that share the buffer."""
        self.update_count += 1
        # The secondary shard is now stale; the next gather has to include all ranks.
        self._secondary_valid = self._all_ranks_gathered = False
        if self.reshards and not self.frees_memory:
            self.transport.publish(self.buffer)

    def _account_memory(self, nbytes: int) -> None:
        self._ledger.set_held_bytes(f"parameters of {self.names[0]}", nbytes)

    def gather_parameter(self, parameter: nn.Parameter, together: Sequence[torch.Tensor]) -> bool:
        """Unshard the unit until the end of the running block.

        Return False if no block runs forward. See `GatherHandler`.
        """
        return self._callbacks.unshard_for_current_block(self)

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the parameter's name, for errors. See `GatherHandler`."""
        return next((n for n, p in zip(self.names, self.parameters, strict=True) if p is parameter), "?")

    def point(self) -> None:
        """Make each parameter that has no private copy a view of `full`, and mark the unit unsharded."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if index in self.privately_held:
                continue
            if isinstance(parameter, ShardedParameter):
                mark_unsharded(parameter)
            put_data(parameter, view)
        if self._freed:
            self.unmark_freed(self._freed - self.privately_held)
        self.shard_state = ShardState.UNSHARDED

    def _mark_freed(self) -> None:
        """Mark the parameters whose values are about to be freed. A private copy keeps its values."""
        freed = set(range(len(self.parameters))) - self._freed - self.privately_held
        mark_freed([self.parameters[index] for index in freed])
        self._freed |= freed

    def unmark_freed(self, indices: Iterable[int]) -> None:
        """Let autograd read the parameters at `indices` again: they have the unit's values now, or a private copy."""
        back = self._freed.intersection(indices)
        unmark_freed([self.parameters[index] for index in back])
        self._freed -= back

    def current_views(self) -> list[torch.Tensor]:
        """Return the values of all parameters: views of `full`, or the memory that a script gave a parameter.

        Only a parameter of a unit that is never resharded keeps memory from a script, of any strides.

        Raises:
            ModelError: a parameter was resized, or has another dtype.
        """
        moved = {} if self.reshards else self.moved_values()
        return [moved.get(index, view) for index, view in enumerate(self._views)]

    def moved_values(self) -> dict[int, torch.Tensor]:
        """Return the values of parameters that a script gave other memory than `full`, by index in the unit.

        Only for units that are never resharded.

        Raises:
            ModelError: a parameter was resized, or has another dtype.
        """
        moved: dict[int, torch.Tensor] = {}
        for index, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if parameter.is_set_to(view):
                continue
            self.require_shape(index, parameter.shape)
            given = raw_data(parameter)
            if given.dtype != view.dtype:
                raise ModelError(
                    f"{self.names[index]!r} had dtype {view.dtype} at initialize and has {given.dtype} now, as after "
                    "module.to(dtype): the step would cast it back. Set bf16, fp16 or torch_autocast in the "
                    "configuration, or cast the model before initialize; a cast for an evaluation must be undone "
                    "before the next step, save, load or full_param"
                )
            moved[index] = given
        return moved

    def require_shape(self, index: int, shape: torch.Size) -> None:
        """Raise ModelError if `shape`, of the parameter at `index` or of its gradient, is not the original shape."""
        if shape != self.shapes[index]:
            raise ModelError(
                f"{self.names[index]!r} had shape {tuple(self.shapes[index])} at initialize and has {tuple(shape)} "
                "now; destroy() the engine before a parameter is resized, and initialize again"
            )

    def pieces(self) -> Iterator[LayoutPiece]:
        """Yield the pieces of the parameters in this rank's state span."""
        return self.layout.pieces(self.state_start, self.state_stop)

    def names_in(self, start: int, stop: int) -> Iterator[str]:
        """Return the quoted names of the parameters in elements `[start, stop)` of the full unit."""
        return (repr(self.names[piece.index]) for piece in self.layout.pieces(start, stop))

    def _names_in_shard(self, start: int, stop: int) -> Iterator[str]:
        begin, _ = self.layout.shard_range(self.transport.group.index, self.transport.group.size)
        return self.names_in(begin + start, begin + stop)

    def local_span(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's state span of a flat tensor over the full unit."""
        return flat[self.state_start : self.state_stop]

    def parameter_view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Return the shaped view of one parameter in a flat tensor over the full unit."""
        return flat.narrow(0, self.layout.offsets[index], self.layout.numels[index]).view(self.shapes[index])


def recapture_parameters(units: Sequence[Unit]) -> None:
    """Copy the values of parameters that have other memory into `full`, and make the parameters views of it again.

    Args:
        units: All units of a model that are never resharded.

    Raises:
        ModelError: a parameter was resized, or has another dtype. No parameter is changed then.
    """
    moved = [(unit, index, given) for unit in units for index, given in unit.moved_values().items()]
    if not moved:
        return
    # After `a.data, b.data = b.data, a.data` or `a.data = a.data.t()`, values are in memory that is overwritten below.
    spans = [(unit.full.data_ptr(), unit.full.data_ptr() + unit.nbytes) for unit in units]
    moved = [
        (unit, index, given.clone() if any(start <= given.data_ptr() < stop for start, stop in spans) else given)
        for unit, index, given in moved
    ]
    for unit, index, given in moved:
        parameter, view = unit.parameters[index], unit.views()[index]
        with torch.no_grad():
            view.copy_(given)
        put_data(parameter, view)
        # `put_data` does not increment the version, but the values may differ from those that autograd saved.
        torch.autograd.graph.increment_version(parameter)


def expert_data_group(units: Sequence[Unit]) -> RankGroup | None:
    """Return the data-parallel group of expert units, whose ranks access the experts independently of other ranks.

    Return None if `units` is empty or contains other units: then all ranks take part.
    """
    return units[0].dp_group.mesh.data if units and all(unit.kind.is_expert for unit in units) else None
