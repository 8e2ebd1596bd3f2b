"""Gradient reducer: from a parameter's `.grad` to this rank's shard of the reduced gradient.

[Note: reduction] The first gradient of a parameter is copied into its unit's flat buffer, later ones are added, and
`.grad` is set to None. Once the unit is complete, its buffer is reduced: `shard += sum over ranks`. The buffer then
counts as empty again. So a unit may be reduced any number of times in a step, and a rank without a gradient for the
unit takes part with zeros. The collective scheduler determines when each unit is reduced (see [Note: agreed order]).
Gradients that are left at the end of a backward are reduced then: those of units with an unused parameter, and second
gradients of the same parameter.

[Note: dropped gradients] A script may drop the gradient of any parameter between two backwards, or before a step. A
gradient that is not reduced yet is dropped at once. A reduced gradient is zeroed in this rank's shard at its next use:
before another reduction adds to it, or when it is read. A unit whose gradients were all dropped has no gradient any
more. Every rank zeroes its own shard, so all ranks that shard a gradient must drop the same gradients, between the same
reductions. At the agreement before a step, they compare a hash of the order of these events, which costs no extra
message. Each replica (MiCS) reduces and drops independently, before the sums of all replicas are added.

[Note: gradients that stay] As in plain PyTorch, a step does not drop the gradient of a parameter that requires one and
is in no group of the optimizer. The gradient accumulates until a script drops it. These parameters have separate units
(`Unit.unstepped`), whose slots the step neither reads nor resets. The norm does not include their gradients. A step
that fails or is skipped drops all gradients. A parameter that joins a group later is stepped with all that has been
accumulated. A unit may also have both kinds of parameters: if too many were in no group for a unit each, and some of
them join a group, or if a parameter leaves its group. The norm leaves out those in no group (`Unit.outside`), but a
step drops all gradients of such a unit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from windlass.base import trace_ranges
from windlass.base.collective_activity import WaitScope
from windlass.base.errors import ModelError
from windlass.base.pending import Pending
from windlass.comm.transport import BufferRequest, Reduction, TransportBuffer, local_shard
from windlass.storage.slot import Slot
from windlass.zero.core.buffer_ring import BufferRing
from windlass.zero.core.completion_order import CompletionOrder
from windlass.zero.core.dp_group import DataParallelGroup
from windlass.zero.core.gradient_offload import GradientOffload
from windlass.zero.core.gradient_slot import GradientSlot
from windlass.zero.core.sharded_parameter import put_grad, raw_grad
from windlass.zero.core.sharding_policy import ShardingPolicy
from windlass.zero.core.unit import Unit

# Exclusive bound of `history_hash`, so that sums of squares of the hashes of a thousand ranks are exact in float64.
_HISTORY_HASHES = 1 << 20


@dataclass(eq=False)
class _ReductionInFlight:
    slot: GradientSlot
    reduction: Reduction
    pending: Pending  # `reduction`, finished after all collectives that started earlier
    ring_index: int | None
    out: torch.Tensor


@dataclass(frozen=True)
class ReducerCallbacks:
    """Callables of the engine and the model that the reducer calls.

    Attributes:
        gradient_weight: Returns the factor of gradients of the running backward, usually 1 / accumulation steps.
        reduces_this_backward: Returns True if the running backward reduces gradients.
        on_gradient: Called with unit, index in the unit and gradient as each gradient arrives; None: not called.
        on_reduced: Called with each slot whose reduction has finished. The transfer of the sum to its tier may still be
            in flight.
        on_drop: Called with the name of each parameter whose gradient a script drops, and True if it is only zeroed.
    """

    gradient_weight: Callable[[], float]
    reduces_this_backward: Callable[[], bool]
    on_gradient: Callable[[Unit, int, torch.Tensor], None] | None
    on_reduced: Callable[[GradientSlot], None]
    on_drop: Callable[[str, bool], None]


class GradientReducer:
    """Reducer of the gradients of one model: accumulates, reduces and drops those of all trainable units.

    Args:
        units: Trainable units, in model order.
        policy: Determines whether gradients are sharded.
        completion: Order in which reductions in flight finish.
        callbacks: Callables of the engine and the model.
        accumulation_dtype: Dtype in which gradients are accumulated.
        reduce_dtype: Dtype in which gradients are sent.
        lowered_reduce_dtype: Dtype in which gradients of units with `Unit.lowered` are sent; None: `reduce_dtype`.
        overlap: Let reductions run during the rest of the backward.
        predivide_factor: Factor of a gradient before the sum over ranks.
        postdivide_factor: Factor of the sum over ranks.
        contiguous: Move each gradient to the buffer as it arrives; else move all gradients of a unit together, once
            each of its parameters has one, or at the end of the backward.
        local_factor: Factor of a gradient while `keeps_local_gradients` is True; replaces the other two factors.
        offload: Moves reduced gradient shards to their tier.

    Attributes:
        slots: Gradient slots of the trainable units; a slot's index is the number of its unit.
        backward_count: Number of outermost backwards with gradients since the last step.
        keeps_local_gradients: True: reduce nothing; each rank keeps its full gradients, see [Note: local gradients].
        dropped_names: Names of parameters whose reduced gradient was dropped since the last step, in order.
        history_hash: Hash of the order of reductions and drops since the last step, without those of experts.
    """

    def __init__(
        self,
        units: list[Unit],
        policy: ShardingPolicy,
        completion: CompletionOrder,
        callbacks: ReducerCallbacks,
        *,
        accumulation_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        lowered_reduce_dtype: torch.dtype | None = None,
        overlap: bool,
        predivide_factor: float,
        postdivide_factor: float,
        contiguous: bool,
        offload: GradientOffload,
        local_factor: float = 1.0,
    ) -> None:
        self.keeps_local_gradients, self._local_factor = False, local_factor
        # Storage of the reduced shard by unit index, while gradients stay local; None: the shard is on the device.
        self._parked: dict[int, Slot | None] = {}
        self._contiguous, self._offload = contiguous, offload
        self._shards_gradients, self._keeps_full_gradient = policy.grad, not policy.state
        self._policy = policy
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
        self._rings = {dp_group: BufferRing(2, numel, accumulation_dtype) for dp_group, numel in largest.items()}
        self._allocated: dict[int, list[TransportBuffer]] = {}
        self._completion, self._callbacks = completion, callbacks
        self._touched = False
        self._in_flight: deque[_ReductionInFlight] = deque()
        self.backward_count = self.history_hash = 0
        self.dropped_names: list[str] = []

    def buffer_requests(self, dp_group: DataParallelGroup) -> list[BufferRequest]:
        """Return the buffers to allocate for a data-parallel group.

        These are two ring buffers if gradients are sharded, else one buffer for each unit.
        """
        if self._shards_gradients:
            ring = self._rings.get(id(dp_group))
            return ring.needs() if ring is not None else []
        return [BufferRequest(slot.unit.layout.padded, self._accumulation_dtype) for slot in self._slots_of(dp_group)]

    def take_buffers(self, dp_group: DataParallelGroup, buffers: list[TransportBuffer]) -> None:
        """Store the buffers that `buffer_requests` requested, until `bind_buffers`."""
        self._allocated[id(dp_group)] = buffers
        if self._shards_gradients and buffers:
            self._rings[id(dp_group)].bind(buffers, dp_group.transport)

    def bind_buffers(self) -> None:
        """Allocate the shards if gradients are sharded, else assign the buffers to the slots."""
        for slot in self.slots:
            if self._shards_gradients:
                self._offload.prepare(slot)
            else:
                slot.buffer = self._allocated[id(slot.unit.dp_group)].pop(0)
        self._allocated = {}

    def keep_local_gradients(self, keep: bool) -> None:
        """Start or stop keeping the gradients of this rank unreduced, from the next backward on.

        Called on all ranks, while there is no gradient. While gradients stay local, each rank holds a full gradient of
        each unit, even if gradients are otherwise sharded.
        """
        if keep == self.keeps_local_gradients:
            return
        self.finish()
        self.keeps_local_gradients = keep
        if not self._policy.grad:
            return
        self._shards_gradients = not keep
        for slot in self.slots:
            self._open_local(slot) if keep else self._close_local(slot)

    def _open_local(self, slot: GradientSlot) -> None:
        """Allocate a full gradient buffer that only this rank reads, for a slot whose gradient is otherwise sharded."""
        self._parked[slot.unit.index] = slot.storage
        slot.storage = slot.shard = None
        numel = slot.unit.layout.padded
        self._offload.account(slot, numel)
        full = torch.zeros(numel, dtype=self._accumulation_dtype, device=slot.unit.full.device)
        slot.buffer = TransportBuffer(full)

    def _close_local(self, slot: GradientSlot) -> None:
        slot.buffer, slot.storage = None, self._parked.pop(slot.unit.index, None)
        self._offload.account(slot, 0)
        if slot.storage is None:
            self._offload.prepare(slot)

    def number_of(self, unit: Unit) -> int | None:
        """Return the number of a unit among the trainable ones; None if it is not trainable."""
        return self._numbers.get(unit.index)

    def _slots_of(self, dp_group: DataParallelGroup) -> list[GradientSlot]:
        return [slot for slot in self.slots if slot.unit.dp_group is dp_group]

    def extra_buffer_requests(self, dp_group: DataParallelGroup, units: list[Unit]) -> list[BufferRequest]:
        """Return the buffers to add when `units` of a group are unfrozen.

        With sharded gradients: a larger ring, if needed. Otherwise: one buffer for each unit.
        """
        if not self._policy.grad:
            return [BufferRequest(unit.layout.padded, self._accumulation_dtype) for unit in units]
        largest, ring = max((unit.layout.padded for unit in units), default=0), self._rings.get(id(dp_group))
        return (
            BufferRing(2, largest, self._accumulation_dtype).needs()
            if largest > (ring.numel if ring is not None else 0)
            else []
        )

    def replace_ring(self, dp_group: DataParallelGroup, buffers: list[TransportBuffer]) -> None:
        """Replace the ring of a group by the buffers that `extra_buffer_requests` requested.

        Called between steps, and only if gradients are sharded.
        """
        ring = self._rings[id(dp_group)] = BufferRing(len(buffers), buffers[0].local.numel(), self._accumulation_dtype)
        ring.bind(buffers, dp_group.transport)

    def add_slots(self, slots: list[GradientSlot], buffers: list[TransportBuffer]) -> None:
        """Add slots of units that are unfrozen.

        `buffers` has one buffer for each slot if gradients are not sharded. Called between steps.
        """
        for number, slot in enumerate(slots):
            self._numbers[slot.unit.index] = len(self.slots)
            self.slots.append(slot)
            if self._policy.grad and self.keeps_local_gradients:
                self._offload.prepare(slot)
                self._open_local(slot)
            elif self._shards_gradients:
                self._offload.prepare(slot)
            else:
                slot.buffer = buffers[number]

    def accumulate_grad(self, number: int, index: int) -> bool:
        """Take the gradient of parameter `index` of trainable unit `number`, which was just added to `.grad`.

        Return True if the unit's gradient is complete on this rank and is to be reduced now.

        Raises:
            ModelError: the gradient has an autograd graph, or the parameter no longer has its original shape.
        """
        slot = self.slots[number]
        parameter = slot.unit.parameters[index]
        gradient = raw_grad(parameter)
        if gradient is None:
            return False
        if gradient.requires_grad:
            put_grad(parameter, None)
            raise ModelError(
                f"backward(create_graph=True) left a gradient with a graph on {slot.unit.names[index]!r}; a sharded "
                "gradient has none. Use torch.autograd.grad(..., create_graph=True) and call backward on the "
                "result"
            )
        if self._callbacks.on_gradient is not None:
            # Call the hook before the gradient is scaled and moved to the buffer.
            self._callbacks.on_gradient(slot.unit, index, gradient)
        self._touched = True
        if self._contiguous:
            self._move_to_buffer(slot, index)
        slot.used.add(index)
        # A second gradient of one parameter in a backward is reduced at the end of the backward.
        again = index in slot.arrived
        slot.arrived.add(index)
        # Finish completed reductions now, to free their buffers for the gradients that follow.
        self._finish_completed()
        if again or not slot.complete:
            return False
        if not self._contiguous:
            self._move_all_to_buffer(slot)
        # In a backward that does not reduce (e.g. under `no_sync`) the gradient stays unreduced.
        return self._callbacks.reduces_this_backward()

    def _move_to_buffer(self, slot: GradientSlot, index: int) -> None:
        """Move a gradient from `.grad` into the unit's buffer."""
        parameter = slot.unit.parameters[index]
        gradient = raw_grad(parameter)
        if gradient is not None:
            # Empty `.grad`, so that autograd does not add the next gradient to this one.
            put_grad(parameter, None)
            slot.unit.require_shape(index, gradient.shape)
            self._write(slot, index, gradient.to_dense() if gradient.is_sparse else gradient)

    def _move_all_to_buffer(self, slot: GradientSlot) -> None:
        for index in sorted(slot.arrived):
            self._move_to_buffer(slot, index)

    def end_backward(self, reduce_remaining: Callable[[Sequence[int], Callable[[int], bool]], None]) -> None:
        """Finish an outermost backward: reduce the gradients that are left, if this backward reduces.

        Args:
            reduce_remaining: `CollectiveScheduler.reduce_remaining`.
        """
        reduces = self._callbacks.reduces_this_backward()
        self._end_backward(reduce_remaining if reduces else None)

    def end_failed_backward(self) -> None:
        """Finish a backward that raised: its gradients stay accumulated on this rank, unreduced."""
        self._end_backward(None)

    def _end_backward(self, reduce_remaining: Callable[[Sequence[int], Callable[[int], bool]], None] | None) -> None:
        if self._touched:
            self.backward_count += 1
            if not self._contiguous:
                for slot in self.slots:
                    self._move_all_to_buffer(slot)
            if reduce_remaining is not None:
                reduce_remaining(range(len(self.slots)), lambda number: bool(self.slots[number].written))
            elif self._shards_gradients:
                # The ring buffers are needed by the next backward.
                for slot in self.slots:
                    self._copy_unreduced(slot)
        self._touched = False
        for slot in self.slots:
            slot.arrived.clear()

    def unreduced(self) -> list[bool]:
        """Return for each unit whether this rank holds gradients of it that are not reduced."""
        return [bool(slot.written) for slot in self.slots]

    def reduce_units(self, wanted: list[bool]) -> None:
        """Reduce the units marked in `wanted`, and wait for them. Collective; `wanted` is equal on all data ranks."""
        for number, wants in enumerate(wanted):
            if wants:
                self.start_reduction(number)
        self.finish()

    def finish(self) -> None:
        """Wait for the reductions in flight and for the offload of their results, then zero dropped gradients."""
        while self._in_flight:
            self._finish_first()
        self._offload.finish()
        for slot in self.slots:
            if slot.dropped:
                self._zero_dropped(slot)

    def all_gather_gradients(self) -> None:
        """All-gather the gradient shards of the peers if every rank keeps full gradients.

        Collective, once, before a step.
        """
        if not self._keeps_full_gradient or self.keeps_local_gradients:
            return
        started, shared = [], []
        for slot in self.slots:
            if slot.has_reduced and not slot.unit.unstepped and slot.unit.dp_group.group.size > 1:
                assert slot.buffer is not None and slot.shard is not None
                # The shard may have moved out of the buffer when the buffer was reused; the all-gather reads the
                # buffer.
                if not _same_memory(slot.shard, slot.buffer.local):
                    slot.buffer.local.copy_(slot.shard)
                    slot.shard = slot.buffer.local
                slot.unit.transport.publish(slot.buffer)
                started.append(slot.unit.transport.all_gather(slot.buffer, elements=slot.unit.numel))
                shared.append((slot.unit.transport, slot.buffer))
        for pending in started:
            pending.wait()
        # A fused optimizer step may scale gradients in place, while peers still read them.
        for transport, buffer in shared:
            transport.wait_until_read(buffer)

    def reset(self, *, keeps_unstepped: bool = False) -> None:
        """Drop this step's gradients. Buffers and sharded gradients stay allocated.

        Args:
            keeps_unstepped: Keep the gradients of units that the optimizer does not step. They must be reduced already.
        """
        ended = [slot for slot in self.slots if not (keeps_unstepped and slot.unit.unstepped)]
        # Clear this first: all gradients are dropped anyway, so `finish` need not zero any of them.
        for slot in ended:
            slot.dropped.clear()
        self.finish()
        for slot in ended:
            # Gradients of a backward that raised are still in `.grad`.
            for index in slot.arrived if not self._contiguous else ():
                put_grad(slot.unit.parameters[index], None)
            slot.written.clear()
            slot.used.clear()
            slot.arrived.clear()
            self._forget_unreduced(slot)
            self._forget_reduced(slot)
        self._touched = any(slot.arrived for slot in self.slots)
        self.backward_count = self.history_hash = 0
        self.dropped_names = []

    # gradients that a script drops: see [Note: dropped gradients]

    def has_gradient(self, number: int, index: int) -> bool:
        """Return True if this rank has a gradient of the parameter in this step."""
        return index in self.slots[number].used

    def unit_has_gradient(self, number: int) -> bool:
        """Return True if this rank has a gradient of the unit, or took part in a reduction of it."""
        slot = self.slots[number]
        return slot.has_reduced or bool(slot.written) or bool(slot.used)

    def drop_gradient(self, number: int, index: int, *, zero: bool) -> None:
        """Drop the gradient of one parameter, or set it to zero. Starts no collective.

        Args:
            zero: The gradient counts as zero, so the optimizer updates the parameter; else it counts as None.
        """
        if not self.unit_has_gradient(number):
            return
        slot = self.slots[number]
        name = slot.unit.names[index]
        self._callbacks.on_drop(name, zero)
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
        # The reduced shard may be in flight or offloaded: zero it at its next use, without waiting here.
        self.dropped_names.append(name)
        self._update_history(slot, 1 + index)
        slot.dropped.add(index)
        # No gradient is left in the unit, so nothing has to be zeroed.
        if len(slot.dropped) == len(slot.unit.parameters) and not slot.used:
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
        """Zero the dropped gradients in this rank's part of a reduced gradient."""
        self._finish_reductions_of(slot)
        self._offload.finish()
        unit, group = slot.unit, slot.unit.dp_group.group
        # With full gradients on each rank, only this rank's shard was reduced, and peers may still read the other
        # shards.
        full = unit.layout.shard_range(group.index, group.size)
        first, last = full if self._keeps_full_gradient else (unit.state_start, unit.state_stop)
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
        """Add an event to the history that must be equal on all ranks of the unit's group.

        Events of experts are left out, because not all ranks reduce the same experts.

        Args:
            event: 0 for a reduction, 1 + index for the drop of a parameter's gradient.
        """
        if not slot.unit.kind.is_expert:
            self.history_hash = hash((self.history_hash, self._numbers[slot.unit.index], event)) % _HISTORY_HASHES

    # writing a gradient

    def _write(self, slot: GradientSlot, index: int, gradient: torch.Tensor) -> None:
        view = slot.unit.parameter_view(self._writable_buffer(slot), index)
        scale = self._local_factor if self.keeps_local_gradients else self._predivide_factor
        factor = scale * self._callbacks.gradient_weight()
        if index in slot.written:
            view.add_(gradient, alpha=factor)
        elif factor == 1.0:
            view.copy_(gradient)  # the common case: no multiplication and no temporary
        elif gradient.dtype == view.dtype:
            torch.mul(gradient, factor, out=view)
        else:
            view.copy_(gradient).mul_(factor)  # widen first: a product in 16 bits would round
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
            # All ring buffers hold incomplete gradients: accumulate in private memory until the reduction.
            unit = slot.unit
            slot.unreduced_copy = torch.zeros(
                unit.layout.padded, dtype=self._accumulation_dtype, device=unit.full.device
            )
            return slot.unreduced_copy
        return buffer.local

    def _reopen(self, slot: GradientSlot) -> None:
        """Make a unit's own buffer writable again.

        Copy a reduced gradient out of the buffer, and wait until peers have finished reading the buffer.
        """
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
        """Borrow a buffer of the ring for `slot`. Return None if all buffers hold incomplete gradients."""
        while True:
            lent = self._ring_of(slot).borrow(slot.unit.layout.padded)
            if lent is not None:
                slot.ring_index, slot.buffer = lent
                return slot.buffer
            # A reduction in flight will return its buffer; without one, no buffer will become free.
            if not self._in_flight:
                return None
            self._finish_first()

    def _copy_unreduced(self, slot: GradientSlot) -> None:
        """Move an unreduced gradient out of the ring to private memory, because other units need the buffer."""
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
        if self._shards_gradients:  # the previous borrower may have had parameters where this unit has padding
            for first, last in layout.gaps(0, layout.padded):
                flat[first:last].zero_()

    # reduction of a unit

    def is_gradient_ready(self, number: int) -> bool:
        """Return True if this rank's gradient of the unit is complete and unreduced, and this backward reduces."""
        slot = self.slots[number]
        return slot.complete and bool(slot.written) and self._callbacks.reduces_this_backward()

    def start_reduction(self, number: int) -> None:
        """Start the reduction of a unit. Its buffer counts as empty afterwards. Collective over the unit's group."""
        slot = self.slots[number]
        group, transport = slot.unit.dp_group.group, slot.unit.transport
        # A reduction adds to the shard, so the previous one must have written it.
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
        # Without sharded gradients the shard is a view of the unit's buffer.
        if not self._shards_gradients and not slot.has_reduced:
            slot.shard = slot.unit.local_span(slot.buffer.local)
        out, add = self._offload.output_buffer(slot, own)
        with WaitScope("reduce", slot.unit.names):
            reduction = transport.reduce(
                number,
                slot.buffer,
                out,
                add=add,
                factor=self._postdivide_factor,
                elements=slot.unit.numel,
                wire=self._lowered_reduce_dtype if slot.unit.lowered else self._reduce_dtype,
            )
        self._in_flight.append(
            _ReductionInFlight(slot, reduction, self._completion.enqueue(reduction), slot.ring_index, out)
        )
        if trace_ranges.recorder is not None:
            trace_ranges.recorder.begin_flight(("reduce", id(slot)), "reduce", slot.unit.names[0])
        # Later gradients of the unit start a new reduction.
        slot.written.clear()
        slot.has_reduced = True
        # The ring buffer now belongs to the reduction in flight, which returns it.
        if self._shards_gradients:
            slot.buffer = slot.ring_index = None
        if not self._overlap:
            self.finish()

    def _kept_span(self, slot: GradientSlot, flat: torch.Tensor) -> torch.Tensor:
        """Return the part of a unit's flat gradient `[padded]` that this rank keeps for the step."""
        return flat if self.keeps_local_gradients else slot.unit.local_span(flat)

    def _keep_local(self, slot: GradientSlot, flat: torch.Tensor) -> None:
        """Count the unit's own gradient `[padded]` as reduced, without communication."""
        if slot.has_reduced:  # reduced before in this step: `shard` has the sum so far, in separate memory
            assert slot.shard is not None
            slot.shard.add_(flat)
        else:
            slot.shard = flat
        slot.norm_squares = None
        slot.written.clear()
        slot.has_reduced = True
        self._callbacks.on_reduced(slot)

    def _prepare(self, slot: GradientSlot) -> None:
        """Put the unit's unreduced gradient (zeros if it has none) into a buffer that peers can read."""
        buffer = slot.buffer
        if buffer is None:
            buffer = self._borrow_buffer(slot)
            if buffer is None:
                # All ring buffers hold incomplete gradients of other units: move one of these to private memory.
                lent = (other for other in self._slots_of(slot.unit.dp_group) if other.ring_index is not None)
                self._copy_unreduced(next(lent))
                buffer = self._borrow_buffer(slot)
            assert buffer is not None
            if slot.unreduced_copy is not None:
                buffer.local.copy_(slot.unreduced_copy)
                slot.unreduced_copy = None
        elif not self._shards_gradients and not slot.written:
            # This rank takes part with zeros, but the buffer still has the reduced gradient.
            self._reopen(slot)
        self._zero_unwritten(slot, buffer.local)

    def _finish_reductions_of(self, slot: GradientSlot) -> None:
        while any(flight.slot is slot for flight in self._in_flight):
            self._finish_first()

    def _finish_completed(self) -> None:
        while self._in_flight and self._in_flight[0].pending.poll():
            self._finish_first()

    def _finish_first(self) -> None:
        """Finish the oldest reduction. Reductions finish in the order in which they started, on all ranks."""
        flight = self._in_flight.popleft()
        with WaitScope("reduce", flight.slot.unit.names):
            flight.pending.wait()
        if trace_ranges.recorder is not None:
            trace_ranges.recorder.end_flight(("reduce", id(flight.slot)))
        flight.slot.norm_squares = flight.reduction.squares
        self._offload.offload(flight.slot, flight.out)
        if flight.ring_index is not None:
            self._ring_of(flight.slot).give_back(flight.ring_index)
        self._callbacks.on_reduced(flight.slot)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()
