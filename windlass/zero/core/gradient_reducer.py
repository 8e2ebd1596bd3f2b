"""From a parameter's `.grad` to this rank's cut of the reduced gradient.

[Note: reduction] A gradient is copied (the first of a unit) or added (later ones) into the unit's flat buffer, `.grad`
is emptied, and when the unit is complete its buffer is reduced: `shard += sum over ranks`, and the buffer counts as
empty again. So a unit may be reduced any number of times in a step, and a rank that has nothing of it yet, or never
will, takes part with zeros. Which units are reduced when is the order's to say (see [Note: agreed order]); what is left
at the end of a backward (a unit of which a parameter was not used, a second arrival) is reduced then.

[Note: dropped gradients] A script may drop the gradient of any parameter between two backwards, or before a step. What
was not reduced yet is forgotten at once. What was reduced is zeroed in this rank's shard where it is needed next:
before another reduction adds to it, or when it is read. A unit of which all parameters were dropped holds nothing any
more. Every rank zeroes its own shard, so all ranks must drop the same, at the same place between the same reductions.
Ranks compare a hash of that order of events at the agreement before a step, which costs no message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from windlass.base.collective_activity import WaitScope
from windlass.base.errors import ModelError
from windlass.base.pending import Pending
from windlass.comm.transport import BufferRequest, Reduction, TransportBuffer, local_shard
from windlass.zero.core.buffer_ring import BufferRing
from windlass.zero.core.collective_scheduler import CollectiveScheduler
from windlass.zero.core.dp_group import DataParallelGroup
from windlass.zero.core.gradient_offload import GradientOffload
from windlass.zero.core.gradient_slot import GradientSlot
from windlass.zero.core.sharded_parameter import put_grad, raw_grad
from windlass.zero.core.sharding_policy import ShardingPolicy
from windlass.zero.core.unit import Unit

_HISTORIES = 1 << 20  # hashes are below: their squares add up exactly in float64, over a thousand ranks


@dataclass(eq=False)
class _ReductionInFlight:
    slot: GradientSlot
    reduction: Reduction
    pending: Pending  # the same, after what was started before it
    ring_index: int | None
    out: torch.Tensor


class GradientReducer:
    """All units' gradients of one engine.

    Args:
        units: the trainable ones, in model order.
        policy: whether gradients are cut.
        order: says when a unit is reduced.
        accumulate: dtype in which gradients are kept.
        wire: dtype in which they travel.
        lowered_wire: that of gradients of lowered units.
        overlap: let reductions run while the backward goes on.
        before: factor of a gradient before the ranks' parts are added.
        after: factor of their sum.
        contiguous: take each gradient as it arrives; else all of a unit once it is complete.
        keeps_local_gradients: reduce nothing; each rank keeps its own whole gradients, see [Note: local gradients].
        landing: takes reduced cuts that rest away from the device to where they do.

    Attributes:
        weight: factor of the gradients of the backward that runs (1 / accumulation steps, as a rule).
        syncing: whether the backward that runs ends in reductions.
        watch: called with unit, index and gradient as each arrives.
        landed: called with each slot whose reduction ended, its sum on the way to where it rests.
        backwards: outermost backwards since the last step that brought gradients.
        drops: what was dropped of reduced gradients since the last step, in order, by parameter.
        history: hash of the order of reductions and drops since the last step, those of experts left out.
        on_drop: called with the name of each parameter that a script drops, and whether it is only zeroed.
    """

    def __init__(
        self,
        units: list[Unit],
        policy: ShardingPolicy,
        scheduler: CollectiveScheduler,
        *,
        accumulation_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        lowered_reduce_dtype: torch.dtype | None = None,
        overlap: bool,
        predivide_factor: float,
        postdivide_factor: float,
        contiguous: bool,
        offload: GradientOffload,
        keeps_local_gradients: bool = False,
    ) -> None:
        self.keeps_local_gradients = keeps_local_gradients
        self._contiguous, self._offload = contiguous, offload
        self._shards_gradients, self._keeps_full_gradient = policy.grad, not policy.state
        self._reduce_dtype, self._lowered_reduce_dtype, self._overlap = (
            reduce_dtype,
            lowered_reduce_dtype or reduce_dtype,
            overlap,
        )
        self._accumulation_dtype, self._predivide_factor, self._postdivide_factor = (
            accumulation_dtype,
            predivide_factor,
            postdivide_factor,
        )
        self.slots = [GradientSlot(unit) for unit in units]
        self._numbers = {slot.unit.index: number for number, slot in enumerate(self.slots)}
        largest: dict[int, int] = {}
        for unit in units:
            largest[id(unit.dp_group)] = max(largest.get(id(unit.dp_group), 0), unit.layout.padded)
        self._rings = {family: BufferRing(2, numel, accumulation_dtype) for family, numel in largest.items()}
        self._allocated: dict[int, list[TransportBuffer]] = {}
        self.gradient_weight: Callable[[], float] = lambda: 1.0
        self.reduces_this_backward: Callable[[], bool] = lambda: True
        self.on_gradient: Callable[[Unit, int, torch.Tensor], None] | None = None
        self.on_reduced: Callable[[GradientSlot], None] = lambda slot: None
        self._scheduler = scheduler
        scheduler.start_reduction = lambda number: self._reduce(self.slots[number])
        scheduler.is_gradient_ready = self._is_ready
        self._touched = False
        self._in_flight: deque[_ReductionInFlight] = deque()
        self.backward_count = self.history_hash = 0
        self.dropped_names: list[str] = []
        self.on_drop: Callable[[str, bool], None] = lambda name, zero: None

    def buffer_requests(self, dp_group: DataParallelGroup) -> list[BufferRequest]:
        """The buffers to allocate for a family: its ring where gradients are cut, else one for each unit."""
        if self._shards_gradients:
            ring = self._rings.get(id(dp_group))
            return ring.needs() if ring is not None else []
        return [BufferRequest(slot.unit.layout.padded, self._accumulation_dtype) for slot in self._slots_of(dp_group)]

    def take_buffers(self, dp_group: DataParallelGroup, buffers: list[TransportBuffer]) -> None:
        """Keep the buffers that `needs` asked for, until `bind`."""
        self._allocated[id(dp_group)] = buffers
        if self._shards_gradients and buffers:
            self._rings[id(dp_group)].bind(buffers, dp_group.transport)

    def bind_buffers(self) -> None:
        """Put the buffers to use."""
        for slot in self.slots:
            if self._shards_gradients:
                self._offload.prepare(slot)
            else:
                slot.buffer = self._allocated[id(slot.unit.dp_group)].pop(0)
        self._allocated = {}

    def number_of(self, unit: Unit) -> int | None:
        """The number of a unit among the trainable ones; None if it is not trained."""
        return self._numbers.get(unit.index)

    def _slots_of(self, dp_group: DataParallelGroup) -> list[GradientSlot]:
        return [slot for slot in self.slots if slot.unit.dp_group is dp_group]

    def extra_buffer_requests(self, dp_group: DataParallelGroup, units: list[Unit]) -> list[BufferRequest]:
        """The buffers to add where `units` of a family begin to be trained: a larger ring, if they need one, or one for
        each."""
        if not self._shards_gradients:
            return [BufferRequest(unit.layout.padded, self._accumulation_dtype) for unit in units]
        largest, ring = max((unit.layout.padded for unit in units), default=0), self._rings.get(id(dp_group))
        return (
            BufferRing(2, largest, self._accumulation_dtype).needs()
            if largest > (ring.numel if ring is not None else 0)
            else []
        )

    def replace_ring(self, dp_group: DataParallelGroup, buffers: list[TransportBuffer]) -> None:
        """Take what `needs_of` asked for where gradients are cut; between steps."""
        ring = self._rings[id(dp_group)] = BufferRing(len(buffers), buffers[0].local.numel(), self._accumulation_dtype)
        ring.bind(buffers, dp_group.transport)

    def add_slots(self, slots: list[GradientSlot], buffers: list[TransportBuffer]) -> None:
        """Take slots of units that begin to be trained, each with its buffer where gradients are not cut; between
        steps."""
        for number, slot in enumerate(slots):
            self._numbers[slot.unit.index] = len(self.slots)
            self.slots.append(slot)
            if self._shards_gradients:
                self._offload.prepare(slot)
            else:
                slot.buffer = buffers[number]

    def accumulate_grad(self, number: int, index: int) -> None:
        """The gradient of parameter `index` of trainable unit `number` was added to `.grad`: take it away.

        Raises:
            ModelError: the gradient has a graph of its own.
        """
        slot = self.slots[number]
        parameter = slot.unit.parameters[index]
        gradient = raw_grad(parameter)
        if gradient is None:
            return
        if gradient.requires_grad:
            put_grad(parameter, None)
            raise ModelError(
                f"backward(create_graph=True) left a gradient with a graph on {slot.unit.names[index]!r}; a sharded "
                "gradient has none. Use torch.autograd.grad(..., create_graph=True) and call backward on what you "
                "make of it"
            )
        if self.on_gradient is not None:
            self.on_gradient(slot.unit, index, gradient)
        self._touched = True
        if self._contiguous:
            self._move_to_buffer(slot, index)
        slot.used.add(index)
        again = index in slot.arrived
        slot.arrived.add(index)
        self._finish_completed()
        if slot.complete and not again:
            if not self._contiguous:
                self._move_all_to_buffer(slot)
            if self.reduces_this_backward():
                self._scheduler.gradient_complete(number)

    def _move_to_buffer(self, slot: GradientSlot, index: int) -> None:
        """Move a gradient from `.grad` into the unit's buffer."""
        parameter = slot.unit.parameters[index]
        gradient = raw_grad(parameter)
        if gradient is not None:
            put_grad(parameter, None)
            slot.unit.require_shape(index, gradient.shape)
            self._write(slot, index, gradient.to_dense() if gradient.is_sparse else gradient)

    def _move_all_to_buffer(self, slot: GradientSlot) -> None:
        for index in sorted(slot.arrived):
            self._move_to_buffer(slot, index)

    def end_backward(self) -> None:
        """The outermost backward ended: reduce what is left, if this backward reduces at all."""
        if self._touched:
            self.backward_count += 1
            if not self._contiguous:
                for slot in self.slots:
                    self._move_all_to_buffer(slot)
            if self.reduces_this_backward():
                self._scheduler.reduce_remaining(
                    range(len(self.slots)), lambda number: bool(self.slots[number].written)
                )
            elif self._shards_gradients:
                for slot in self.slots:
                    self._copy_unreduced(slot)
        self._touched = False
        for slot in self.slots:
            slot.arrived.clear()

    def unreduced(self) -> list[bool]:
        """For each unit, whether this rank holds gradients of it that were not reduced."""
        return [bool(slot.written) for slot in self.slots]

    def reduce_units(self, wanted: list[bool]) -> None:
        """Reduce the units in `wanted`, which is the same on all ranks. Collective."""
        for slot, wants in zip(self.slots, wanted, strict=True):
            if wants:
                self._reduce(slot)
        self.finish()

    def finish(self) -> None:
        """Wait for the reductions under way, and until their results are where they rest."""
        while self._in_flight:
            self._finish_first()
        self._offload.finish()
        for slot in self.slots:
            if slot.dropped:
                self._zero_dropped(slot)

    def all_gather_gradients(self) -> None:
        """Where every rank keeps the whole gradient, bring the others' cuts. Collective, once, before a step."""
        if not self._keeps_full_gradient or self.keeps_local_gradients:
            return
        started, shared = [], []
        for slot in self.slots:
            if slot.has_reduced and slot.unit.dp_group.group.size > 1:
                assert slot.buffer is not None and slot.shard is not None
                if not _same_memory(slot.shard, slot.buffer.local):
                    slot.buffer.local.copy_(slot.shard)
                    slot.shard = slot.buffer.local
                slot.unit.transport.publish(slot.buffer)
                started.append(slot.unit.transport.all_gather(slot.buffer, elements=slot.unit.numel))
                shared.append((slot.unit.transport, slot.buffer))
        for pending in started:
            pending.wait()
        for transport, buffer in shared:  # a fused step divides gradients where they lie
            transport.wait_until_read(buffer)

    def reset(self) -> None:
        """Forget this step's gradients; their memory stays."""
        for slot in self.slots:
            slot.dropped.clear()
        self.finish()
        for slot in self.slots:
            slot.written.clear()
            slot.used.clear()
            slot.arrived.clear()
            self._forget_unreduced(slot)
            self._forget_reduced(slot)
        self.backward_count = self.history_hash = 0
        self.dropped_names = []

    # what a script drops: see [Note: dropped gradients]

    def has_gradient(self, number: int, index: int) -> bool:
        """Whether this rank knows of a gradient of a parameter in this step."""
        return index in self.slots[number].used

    def unit_has_gradient(self, number: int) -> bool:
        """Whether there is a gradient of any parameter of a unit, of any rank as far as this one knows."""
        slot = self.slots[number]
        return slot.has_reduced or bool(slot.written) or bool(slot.used)

    def drop_gradient(self, number: int, index: int, *, zero: bool) -> None:
        """Drop the gradient of one parameter, or set it to zero. On this rank alone; no rank waits for another.

        Args:
            zero: it counts as zero then, and the optimizer steps it; else as none.
        """
        if not self.unit_has_gradient(number):
            return
        slot = self.slots[number]
        name = slot.unit.names[index]
        self.on_drop(name, zero)
        if index in slot.written and zero:
            flat = (
                slot.unreduced_copy
                if slot.unreduced_copy is not None
                else slot.buffer.local
                if slot.buffer is not None
                else None
            )
            assert flat is not None
            slot.unit.parameter_view(flat, index).zero_()
        elif index in slot.written:
            slot.written.discard(index)
            if not slot.written:
                self._forget_unreduced(slot)
        if not zero:
            slot.used.discard(index)
        if not slot.has_reduced:
            return
        self.dropped_names.append(name)
        self._update_history(slot, 1 + index)
        slot.dropped.add(index)
        if len(slot.dropped) == len(slot.unit.parameters) and not slot.used:  # nothing is left to zero
            self._finish_reductions_of(slot)
            self._offload.finish()
            slot.dropped.clear()
            self._forget_reduced(slot)

    def _forget_unreduced(self, slot: GradientSlot) -> None:
        if slot.ring_index is not None:
            self._ring_of(slot).give_back(slot.ring_index)
            slot.buffer = slot.ring_index = None
        slot.unreduced_copy = None

    def _forget_reduced(self, slot: GradientSlot) -> None:
        slot.has_reduced = slot.is_offloaded = False
        slot.norm_squares = None
        if not self._shards_gradients:
            slot.shard = None

    def _zero_dropped(self, slot: GradientSlot) -> None:
        """Zero what was dropped in this rank's part of a reduced gradient."""
        self._finish_reductions_of(slot)
        self._offload.finish()
        unit, group = slot.unit, slot.unit.dp_group.group
        # where each rank keeps the whole gradient only this rank's part was reduced, and peers may still read the rest
        whole = unit.layout.shard_range(group.index, group.size)
        first, last = whole if self._keeps_full_gradient else (unit.state_start, unit.state_stop)
        if self.keeps_local_gradients:
            first, last = 0, unit.layout.padded
        values = slot.read()
        part = values[first:last] if values.numel() == unit.layout.padded else values
        for piece in unit.layout.pieces(first, last):
            if piece.index in slot.dropped:
                part.narrow(0, piece.offset, piece.numel).zero_()
        slot.dropped.clear()
        slot.write(values)

    def _update_history(self, slot: GradientSlot, event: int) -> None:
        """Add an event to the history that all data ranks share. Experts may be reduced by some of them alone."""
        if not slot.unit.kind.is_expert:
            self.history_hash = hash((self.history_hash, self._numbers[slot.unit.index], event)) % _HISTORIES

    # where a gradient is written

    def _write(self, slot: GradientSlot, index: int, gradient: torch.Tensor) -> None:
        view = slot.unit.parameter_view(self._writable_buffer(slot), index)
        factor = self._predivide_factor * self.gradient_weight()
        if index in slot.written:
            view.add_(gradient, alpha=factor)
        elif factor == 1.0:
            view.copy_(gradient)
        elif gradient.dtype == view.dtype:
            torch.mul(gradient, factor, out=view)
        else:
            view.copy_(gradient).mul_(factor)  # widened first: a product in 16 bits would round
        slot.written.add(index)

    def _writable_buffer(self, slot: GradientSlot) -> torch.Tensor:
        if slot.unreduced_copy is not None:
            return slot.unreduced_copy
        if not self._shards_gradients:
            assert slot.buffer is not None
            if not slot.written:
                self._reopen(slot)
            return slot.buffer.local
        buffer = slot.buffer if slot.buffer is not None else self._borrow_buffer(slot)
        if buffer is None:
            unit = slot.unit
            slot.unreduced_copy = torch.zeros(
                unit.layout.padded, dtype=self._accumulation_dtype, device=unit.full.device
            )
            return slot.unreduced_copy
        return buffer.local

    def _reopen(self, slot: GradientSlot) -> None:
        """Make a unit's own buffer writable again: what was reduced into it moves out, and peers have read it."""
        assert slot.buffer is not None
        self._finish_reductions_of(slot)
        if (
            slot.has_reduced
            and slot.shard is not None
            and _same_memory(slot.shard, self._kept_span(slot, slot.buffer.local))
        ):
            slot.shard = slot.shard.clone()
        slot.unit.transport.wait_until_read(slot.buffer)

    def _ring_of(self, slot: GradientSlot) -> BufferRing:
        return self._rings[id(slot.unit.dp_group)]

    def _borrow_buffer(self, slot: GradientSlot) -> TransportBuffer | None:
        """Lend `slot` a buffer of the ring; None if all hold gradients that are still incomplete."""
        while True:
            lent = self._ring_of(slot).borrow(slot.unit.layout.padded)
            if lent is not None:
                slot.ring_index, slot.buffer = lent
                return slot.buffer
            if not self._in_flight:
                return None
            self._finish_first()

    def _copy_unreduced(self, slot: GradientSlot) -> None:
        """Move a gradient that stays out of the ring, which others need."""
        if slot.buffer is not None and slot.ring_index is not None:
            self._zero_unwritten(slot, slot.buffer.local)
            slot.unreduced_copy = slot.buffer.local.clone()
            self._ring_of(slot).give_back(slot.ring_index)
            slot.buffer = slot.ring_index = None

    def _zero_unwritten(self, slot: GradientSlot, flat: torch.Tensor) -> None:
        layout = slot.unit.layout
        for index in range(len(slot.unit.parameters)):
            if index not in slot.written:
                slot.unit.parameter_view(flat, index).zero_()
        if self._shards_gradients:  # a ring's buffer had other parameters in what is padding here
            for first, last in layout.gaps(0, layout.padded):
                flat[first:last].zero_()

    # when a unit is reduced

    def _is_ready(self, number: int) -> bool:
        """Whether what this rank will have of a unit's gradient is there, and not reduced yet."""
        slot = self.slots[number]
        return slot.complete and bool(slot.written) and self.reduces_this_backward()

    def _reduce(self, slot: GradientSlot) -> None:
        """Start the reduction of a unit; its buffer is empty from then on."""
        group, transport = slot.unit.dp_group.group, slot.unit.transport
        self._finish_reductions_of(slot)
        if slot.dropped:
            self._zero_dropped(slot)
        self._update_history(slot, 0)
        self._prepare(slot)
        assert slot.buffer is not None
        if self.keeps_local_gradients:
            self._keep_local(slot, slot.buffer.local)
            return
        own = local_shard(slot.buffer.local, group.index, group.size)
        if not self._shards_gradients and not slot.has_reduced:
            slot.shard = slot.unit.local_span(slot.buffer.local)
        out, add = self._offload.output_buffer(slot, own)
        with WaitScope("reduce", slot.unit.names):
            reduction = transport.reduce(
                self.slots.index(slot),
                slot.buffer,
                out,
                add=add,
                factor=self._postdivide_factor,
                elements=slot.unit.numel,
                wire=self._lowered_reduce_dtype if slot.unit.lowered else self._reduce_dtype,
            )
        self._in_flight.append(
            _ReductionInFlight(slot, reduction, self._scheduler.enqueue(reduction), slot.ring_index, out)
        )
        slot.written.clear()
        slot.has_reduced = True
        if self._shards_gradients:
            slot.buffer = slot.ring_index = None
        if not self._overlap:
            self.finish()

    def _kept_span(self, slot: GradientSlot, flat: torch.Tensor) -> torch.Tensor:
        """Return the part of a unit's flat gradient `[padded]` that this rank keeps for the step."""
        return flat if self.keeps_local_gradients else slot.unit.local_span(flat)

    def _keep_local(self, slot: GradientSlot, flat: torch.Tensor) -> None:
        """Count the unit's own gradient `[padded]` as reduced, without communication."""
        if slot.has_reduced:  # a second time in this step: the first part lies in memory of its own
            assert slot.shard is not None
            slot.shard.add_(flat)
        else:
            slot.shard = flat
        slot.norm_squares = None
        slot.written.clear()
        slot.has_reduced = True
        self.on_reduced(slot)

    def _prepare(self, slot: GradientSlot) -> None:
        """Have the unit's unreduced gradient, zeros where there is none, in a buffer that peers can read."""
        buffer = slot.buffer
        if buffer is None:
            buffer = self._borrow_buffer(slot)
            if buffer is None:
                lent = (other for other in self._slots_of(slot.unit.dp_group) if other.ring_index is not None)
                self._copy_unreduced(next(lent))
                buffer = self._borrow_buffer(slot)
            assert buffer is not None
            if slot.unreduced_copy is not None:
                buffer.local.copy_(slot.unreduced_copy)
                slot.unreduced_copy = None
        elif not self._shards_gradients and not slot.written:
            self._reopen(slot)
        self._zero_unwritten(slot, buffer.local)

    def _finish_reductions_of(self, slot: GradientSlot) -> None:
        while any(flight.slot is slot for flight in self._in_flight):
            self._finish_first()

    def _finish_completed(self) -> None:
        while self._in_flight and self._in_flight[0].pending.poll():
            self._finish_first()

    def _finish_first(self) -> None:
        """Finish the oldest reduction: they end in the order in which they began, as on all ranks."""
        flight = self._in_flight.popleft()
        with WaitScope("reduce", flight.slot.unit.names):
            flight.pending.wait()
        flight.slot.norm_squares = flight.reduction.squares
        self._offload.offload(flight.slot, flight.out)
        if flight.ring_index is not None:
            self._ring_of(flight.slot).give_back(flight.ring_index)
        self.on_reduced(flight.slot)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()
