"""Unshard runtime: unshards units before their uses in forward and backward, and reshards them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch

from windlass.base import trace_ranges
from windlass.base.backward_callbacks import current_backward_id, queue_end_of_backward
from windlass.base.collective_activity import WaitScope
from windlass.base.tensor_tree import iterate_tensors
from windlass.comm.rank_group import RankGroup
from windlass.zero.core.collective_scheduler import BACKWARD, EVALUATION, FORWARD, CollectiveScheduler, SyncPoint
from windlass.zero.core.prefetcher import Prefetcher
from windlass.zero.core.unit import ShardState, Unit, expert_data_group
from windlass.zero.core.unit_plan import Block


@dataclass(eq=False)
class BlockCall:
    """One call of a block, with the units that it uses in its forward and again in its backward."""

    block: Block
    units: list[Unit] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)  # input tensors of the call, cleared when it returns
    leaves: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (view, input leaf it replaces)
    given: Any = None  # the caller's (args, kwargs), if `leaves` is not empty; else None
    range_token: int | None = None  # token of the forward's range in a trace; None: not recorded


@dataclass(frozen=True)
class RuntimeCallbacks:
    """Callables of the model that the runtime calls.

    Attributes:
        will_reduce: Returns True if the backward that begins will reduce gradients.
        on_backward_begin: Called when an outermost backward outside a forward begins.
        on_backward_end: Called when the outermost backward has ended and its units are resharded.
        on_backward_failed: Called in place of `on_backward_end` if the backward raised, at the next use of the model.
        after_unshard_all: Called after `unsharded` or `exact_values` has all-gathered its units, with the group of
            ranks that took part; None: all ranks.
        require_parameters: Raises if the parameters of any of these units are offloaded by `offload_states`. Called
            before a forward, and before `unsharded` and `exact_values`.
    """

    will_reduce: Callable[[], bool]
    on_backward_begin: Callable[[], None]
    on_backward_end: Callable[[], None]
    on_backward_failed: Callable[[], None]
    after_unshard_all: Callable[[RankGroup | None], None]
    require_parameters: Callable[[Sequence[Unit]], None]


class UnshardRuntime:
    """Runtime that unshards units before use and reshards them afterwards, in forward and backward.

    [Note: when a unit is resharded] A unit is resharded after a forward, unless the forward runs inside a backward
    (recomputation). It is resharded after the backward of a call, i.e. when the gradient of one of the block's inputs
    is complete: autograd runs ready nodes in reverse order of their creation, so every node of the block has run by
    then. A block whose inputs need no gradient keeps its units to the end of the outermost backward. The arrival of the
    gradients of a block's parameters is not sufficient: the gradients of its inputs may still need frozen weights. A
    unit that is used again soon stays unsharded (`stage3_max_reuse_distance`).

    [Note: a backward that raised] torch does not call the end callback of a backward that raised, but frees it. So an
    open backward whose callback is freed has raised, as has any open backward if no backward runs. The next forward,
    backward or step ends the failed backward, on this rank alone: nothing is reduced, and the gradients that arrived
    stay accumulated, as in plain PyTorch, unless the script drops them.
    """

    def __init__(
        self,
        units: list[Unit],
        blocks: list[Block],
        prefetcher: Prefetcher,
        scheduler: CollectiveScheduler,
        callbacks: RuntimeCallbacks,
    ) -> None:
        self.units = units
        self.prefetcher, self.scheduler, self._callbacks = prefetcher, scheduler, callbacks
        self._units_of_block: dict[int, list[Unit]] = {id(block): [] for block in blocks}
        for unit in units:
            if unit.reshards:
                for block in unit.blocks:
                    self._units_of_block[id(block)].append(unit)
        self._call_stack: list[BlockCall] = []
        self._depth = 0
        self._open_backwards: dict[int, ref[Callable[[], None]]] = {}  # end callbacks, by backward id
        # Ids of the block calls whose backward runs, by unit index.
        self._calls_in_backward: dict[int, set[int]] = {unit.index: set() for unit in units}
        self._had_backward = False

    @property
    def in_forward(self) -> bool:
        """True while the model runs forward."""
        return self._depth > 0

    def live_numel(self) -> int:
        """Return the number of elements of reshardable units that are unsharded or in flight."""
        return sum(u.numel for u in self.units if u.reshards and u.shard_state is not ShardState.SHARDED)

    def begin_model_forward(self) -> None:
        """Begin a forward of the outermost module."""
        self._depth += 1  # first, because `end_model_forward` is called even if this method raises
        self.end_failed_backwards()
        # All units, because the use of one unit may prefetch another.
        self._callbacks.require_parameters(self.units)
        # A recomputation inside a backward is part of that backward's phase.
        if self._depth == 1 and current_backward_id() < 0:
            self.prefetcher.begin_forward(had_backward=self._had_backward)
            self._had_backward = False
            self.scheduler.begin_phase(FORWARD if torch.is_grad_enabled() else EVALUATION, reduces=False)

    @property
    def is_running(self) -> bool:
        """True during a forward or a backward."""
        return self._depth > 0 or any(self._is_open(number) for number in self._open_backwards)

    def end_model_forward(self) -> None:
        """End a forward of the outermost module, after success or failure."""
        self._depth -= 1
        if self._depth == 0:
            self._call_stack.clear()
            self.scheduler.end_phase(FORWARD, EVALUATION)

    def pre_forward(self, block: Block) -> BlockCall:
        """Unshard the units of a block before its forward, wait for them, and return the new call of the block."""
        if not self._depth and not self._call_stack:  # the script calls a block alone
            self._callbacks.require_parameters(self.units)
        call = BlockCall(block, list(self._units_of_block[id(block)]))
        self._call_stack.append(call)
        if trace_ranges.recorder is not None:
            call.range_token = trace_ranges.recorder.begin("block", block.name)
        if current_backward_id() >= 0:
            self.register_backward()  # a recomputation: the outer backward must be registered before any nested one
        # Increment all counts before any unshard, because `post_forward` decrements all even if an unshard raises.
        for unit in call.units:
            unit.users += 1
        for unit in call.units:
            self._unshard(unit, backward=False)
        return call

    def post_forward(self, block: Block, output: object = None) -> BlockCall | None:
        """Reshard the block's units after its forward, unless they are still in use.

        A unit is still in use if, for example, the output is a view of one of its parameters. Return the ended call;
        None if `pre_forward` did not run.
        """
        if not self._call_stack or self._call_stack[-1].block is not block:
            return None  # an error occurred before `pre_forward`, and torch calls this hook even so
        call = self._call_stack.pop()
        recomputing = current_backward_id() >= 0
        for unit in call.units:
            unit.users -= 1
            if (
                self._call_stack
                and unit.frees_memory
                and any(_is_view_of_unit(tensor, unit) for tensor in iterate_tensors(output))
            ):
                # The enclosing block may use the view, so it holds the unit until its own end.
                self.unshard_for_current_block(unit)
            # After a recomputation the backward of the block follows at once.
            if not recomputing:
                self.reshard(unit)
        if call.range_token is not None and trace_ranges.recorder is not None:
            trace_ranges.recorder.end(call.range_token)
        return call

    def current_call(self, block: Block) -> BlockCall | None:
        """Return the innermost running call if it is a call of `block`; else None."""
        return self._call_stack[-1] if self._call_stack and self._call_stack[-1].block is block else None

    def pre_backward(self, call: BlockCall) -> None:
        """Unshard the units of `call` when a gradient reaches one of its tensors, and wait for them.

        Only the first gradient of a backward counts: the trace of the prefetcher has one use for each backward.
        """
        self.register_backward()
        for unit in call.units:
            if torch.is_grad_enabled():
                unit.keep_unsharded = True  # create_graph: nodes created now may use the values at any later time
            calls = self._calls_in_backward[unit.index]
            if id(call) not in calls:
                calls.add(id(call))
                self._unshard(unit, backward=True)

    def post_backward(self, call: BlockCall) -> None:
        """Reshard the units of `call` at the end of its backward: the gradient of one of its inputs is complete."""
        for unit in call.units:
            self._calls_in_backward[unit.index].discard(id(call))
            self.reshard(unit)

    def unshard_for_current_block(self, unit: Unit) -> bool:
        """Unshard `unit` for the innermost running block, and add it to the units of this block.

        Return False if no block runs forward.
        """
        if not self._call_stack:
            return False
        call = self._call_stack[-1]
        if unit in call.units:
            return True
        # Later calls of the block will unshard the unit before their forward.
        self._units_of_block[id(call.block)].append(unit)
        unit.blocks.append(call.block)
        call.units.append(unit)
        unit.users += 1
        self._unshard(unit, backward=False)
        return True

    def keep_until_step(self, call: BlockCall) -> None:
        """Keep the units of `call` unsharded until the step, because no hook will detect the start of its backward."""
        for unit in call.units:
            unit.keep_unsharded = True
            self._unshard(unit, backward=False)

    def register_backward(self) -> None:
        """Register the running backward, to detect its end.

        Called by each hook that may be the first in a backward. Nested backwards count as part of the outermost
        one: `on_backward_end` is called when none of them is open.
        """
        number = current_backward_id()
        if number >= 0 and number not in self._open_backwards:
            self.end_failed_backwards()
            # A backward inside a forward (`_depth` > 0) belongs to the phase of the forward.
            if not self._open_backwards and not self._depth:
                self._callbacks.on_backward_begin()
                self.scheduler.begin_phase(BACKWARD, reduces=self._callbacks.will_reduce())
            end = partial(self._end_backward, number)
            self._open_backwards[number] = ref(end)
            queue_end_of_backward(end)

    def end_failed_backwards(self) -> None:
        """End the backwards that raised: see [Note: a backward that raised]. Not collective."""
        if self._forget_failed_backwards() and not self._open_backwards:
            self._reshard_after_backward()
            self._callbacks.on_backward_failed()

    def _is_open(self, number: int) -> bool:
        return current_backward_id() >= 0 and self._open_backwards[number]() is not None

    def _forget_failed_backwards(self) -> bool:
        failed = [number for number in self._open_backwards if not self._is_open(number)]
        for number in failed:
            del self._open_backwards[number]
        return bool(failed)

    def reshard_all(self) -> None:
        """Reshard all units that are not in use, and clear `keep_unsharded`.

        Outside a backward, calls without a recorded end (an exception in a backward, Ctrl-C in a forward) count as
        ended.
        """
        if current_backward_id() < 0:
            self.end_failed_backwards()
            for active in self._calls_in_backward.values():
                active.clear()
            for call in self._call_stack:
                for unit in call.units:
                    unit.users -= 1
            self._call_stack.clear()
            self._depth = 0
        for unit in self.units:
            unit.keep_unsharded = False
            self.reshard(unit, keep_if_reused=False)

    @contextmanager
    def unsharded(self, units: list[Unit], *, experts_only: bool = False, names: Sequence[str] = ()) -> Iterator[None]:
        """Keep `units` unsharded inside the context. Collective, like the gathers.

        Args:
            experts_only: `units` are experts, so only ranks that hold the same experts take part.
            names: Parameters to name in reports of hangs; by default all parameters of the first unit.
        """
        self._callbacks.require_parameters(units)
        # Count the users first, because the sync may reshard units without users.
        for unit in units:
            unit.users += 1
        try:
            with WaitScope("gather", names or (units[0].names if units else ())):  # for the reports of the watchdog
                self.scheduler.unshard_all(units, SyncPoint.FULL_GATHER, experts_only=experts_only)
                for unit in units:
                    unit.wait_for_unshard()
            self._callbacks.after_unshard_all(expert_data_group(units) if experts_only else None)
            yield
        finally:
            for unit in units:
                unit.users -= 1
                self.reshard(unit, keep_if_reused=False)

    @contextmanager
    def exact_values(
        self, unit: Unit, *, experts_only: bool = False, names: Sequence[str] = ()
    ) -> Iterator[list[torch.Tensor]]:
        """Yield the exact values of a unit's parameters, in their shapes, even if its codec is lossy. Collective.

        The values may be views of the unit's buffer `full`, valid only inside the context.

        Args:
            experts_only, names: See `unsharded`.
        """
        if unit.gather_codec is None:
            with self.unsharded([unit], experts_only=experts_only, names=names):
                yield unit.current_views()
            return
        self._callbacks.require_parameters([unit])
        with WaitScope("gather", names or unit.names):
            self.scheduler.sync(SyncPoint.FULL_GATHER, experts_only=experts_only)
            values = unit.gather_exact()
        self._callbacks.after_unshard_all(expert_data_group([unit]) if experts_only else None)
        yield values

    def _unshard(self, unit: Unit, *, backward: bool) -> None:
        if not unit.reshards:
            return
        # Record also uses of unsharded units: the trace has the order of uses, not of gathers.
        self.prefetcher.record_use(unit)
        self.scheduler.unshard(unit, backward=backward)
        unit.wait_for_unshard(backward=backward)
        # Start the next gathers now, to overlap them with this block's computation.
        if unit.frees_memory:
            for other in self.prefetcher.units_to_prefetch(self.live_numel()):
                if not self.scheduler.prefetch(other, backward=backward):
                    # The agreed order has another collective next; prefetching further would leave the order.
                    break
            self.scheduler.advance()
            # Reading from NVMe takes longest, so it starts ahead of the gathers.
            for other in self.prefetcher.units_to_read_ahead():
                if not other.read_ahead():
                    break

    def reshard(self, unit: Unit, *, keep_if_reused: bool = True) -> None:
        """Reshard `unit` unless it is in use, or, with `keep_if_reused`, used again soon."""
        if not unit.reshards or unit.users or unit.keep_unsharded or self._calls_in_backward[unit.index]:
            return
        if unit.shard_state is ShardState.SHARDED:
            return
        # Keep a unit that is used again soon, e.g. the last block between forward and backward.
        if keep_if_reused and self.prefetcher.is_reused_soon(unit, self.live_numel()):
            return
        unit.reshard()

    def _end_backward(self, number: int) -> None:
        del self._open_backwards[number]
        self._forget_failed_backwards()  # nested backwards whose error the script caught inside this backward
        if self._open_backwards:
            return
        # The next forward may then use this step's trace as its prediction.
        self._had_backward = True
        self._reshard_after_backward()
        self._callbacks.on_backward_end()
        self.scheduler.end_phase(BACKWARD)

    def _reshard_after_backward(self) -> None:
        # Blocks whose inputs need no gradient have no end-of-backward hook.
        for active in self._calls_in_backward.values():
            active.clear()
        for unit in self.units:
            self.reshard(unit, keep_if_reused=False)


def _is_view_of_unit(tensor: torch.Tensor, unit: Unit) -> bool:
    """Return True if a tensor is a view into the memory of the unit's `full`."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    return tensor.untyped_storage().data_ptr() == unit.full.untyped_storage().data_ptr()
