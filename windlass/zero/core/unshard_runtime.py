"""The one place that decides when units are gathered and released."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from windlass.base.backward_callbacks import current_backward_id, queue_end_of_backward
from windlass.base.collective_activity import WaitScope
from windlass.base.tensor_tree import iterate_tensors
from windlass.comm.rank_group import RankGroup
from windlass.zero.core.collective_scheduler import BACKWARD, EVALUATION, FORWARD, CollectiveScheduler
from windlass.zero.core.prefetcher import Prefetcher
from windlass.zero.core.unit import ShardState, Unit, expert_data_group
from windlass.zero.core.unit_partition import Block


@dataclass(eq=False)
class BlockCall:
    """One call of a block: which units it uses, in its forward and again in its backward."""

    block: Block
    units: list[Unit] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)  # what it was called with, until it returns


class UnshardRuntime:
    """Gathers before use, releases after, in forward and backward.

    [Note: when a unit may go] After a forward, unless that runs inside a backward (recomputation). After the backward
    of
    a call, which is when the gradient of one of the block's inputs is complete: autograd runs ready nodes last made
    first, so by then every node of the block has run. A block whose inputs need no gradient keeps its units to the end
    of the outermost backward. "Its own gradients arrived" is no sign: a frozen weight is still needed by what lies
    below.
    """

    def __init__(
        self, units: list[Unit], blocks: list[Block], prefetcher: Prefetcher, scheduler: CollectiveScheduler
    ) -> None:
        self.units = units
        self.prefetcher, self.scheduler = prefetcher, scheduler
        scheduler.reshard_unused = self._reshard
        self.will_reduce: Callable[[], bool] = lambda: False  # whether the backward that begins will reduce gradients
        self.on_backward_begin: list[Callable[[], None]] = []
        self.on_backward_end: list[Callable[[], None]] = []
        self.after_unshard_all: Callable[[RankGroup | None], None] = lambda among: (
            None
        )  # when what `holding` holds is present
        self._units_of_block: dict[int, list[Unit]] = {id(block): [] for block in blocks}
        for unit in units:
            unit.unshard_for_current_block = self.unshard_for_current_block
            if unit.reshards:
                for block in unit.blocks:
                    self._units_of_block[id(block)].append(unit)
        self._call_stack: list[BlockCall] = []
        self._depth = 0
        self._open_backwards: set[int] = set()
        self._calls_in_backward: dict[int, set[int]] = {
            unit.index: set() for unit in units
        }  # calls whose backward runs
        self._had_backward = False

    @property
    def in_forward(self) -> bool:
        """Whether the model runs forward now."""
        return self._depth > 0

    def live_numel(self) -> int:
        """Elements of releasable units that are present or coming."""
        return sum(u.numel for u in self.units if u.reshards and u.shard_state is not ShardState.SHARDED)

    def begin_model_forward(self) -> None:
        """The outermost module begins its forward."""
        self._depth += 1  # first: what ends a forward is called even where this fails
        if self._depth == 1 and current_backward_id() < 0:
            self.prefetcher.begin_forward(had_backward=self._had_backward)
            self._had_backward = False
            self.scheduler.begin_phase(FORWARD if torch.is_grad_enabled() else EVALUATION, reduces=False)

    def end_model_forward(self) -> None:
        """The outermost module ended its forward, or failed in it."""
        self._depth -= 1
        if self._depth == 0:
            self._call_stack.clear()
            self.scheduler.end_phase(FORWARD, EVALUATION)

    def pre_forward(self, block: Block) -> BlockCall:
        """Before a block runs: its units are present when this returns."""
        call = BlockCall(block, list(self._units_of_block[id(block)]))
        self._call_stack.append(call)
        if current_backward_id() >= 0:
            self.register_backward()  # a recomputation: the backward around it must be known before any nested one
        for unit in call.units:  # all at once: `exit_block` counts all of them off, also where this fails half-way
            unit.users += 1
        for unit in call.units:
            self._unshard(unit, backward=False)
        return call

    def post_forward(self, block: Block, output: object = None) -> BlockCall | None:
        """After a block ran: its units go unless something still needs them, as who gets a view of a parameter does."""
        if not self._call_stack or self._call_stack[-1].block is not block:
            return None  # something failed before it was entered, and torch calls what comes after all the same
        call = self._call_stack.pop()
        recomputing = current_backward_id() >= 0
        for unit in call.units:
            unit.users -= 1
            if (
                self._call_stack
                and unit.frees_memory
                and any(_is_view_of_unit(tensor, unit) for tensor in iterate_tensors(output))
            ):
                self.unshard_for_current_block(unit)
            if not recomputing:
                self._reshard(unit)
        return call

    def pre_backward(self, call: BlockCall) -> None:
        """A gradient reached an output of `call`: its units are present when this returns."""
        self.register_backward()
        for unit in call.units:
            self._calls_in_backward[unit.index].add(id(call))
            if torch.is_grad_enabled():
                unit.keep_unsharded = (
                    True  # create_graph: nodes made now come back to its values at a time nobody knows
                )
            self._unshard(unit, backward=True)

    def post_backward(self, call: BlockCall) -> None:
        """The gradient of an input of `call` is complete, so its backward is."""
        for unit in call.units:
            self._calls_in_backward[unit.index].discard(id(call))
            self._reshard(unit)

    def unshard_for_current_block(self, unit: Unit) -> bool:
        """Gather `unit` for a block that uses it without owning it, and tie it to that block; False outside a
        forward."""
        if not self._call_stack:
            return False
        call = self._call_stack[-1]
        if unit in call.units:
            return True
        self._units_of_block[id(call.block)].append(unit)
        unit.blocks.append(call.block)
        call.units.append(unit)
        unit.users += 1
        self._unshard(unit, backward=False)
        return True

    def keep_until_step(self, call: BlockCall) -> None:
        """The backward of `call` will not be announced."""
        for unit in call.units:
            unit.keep_unsharded = True
            self._unshard(unit, backward=False)

    def register_backward(self) -> None:
        """Called by every hook that runs in a backward, so that its end is seen; nested ones count until all ended."""
        number = current_backward_id()
        if number >= 0 and number not in self._open_backwards:
            if not self._open_backwards and not self._depth:
                for callback in self.on_backward_begin:
                    callback()
                self.scheduler.begin_phase(BACKWARD, reduces=self.will_reduce())
            self._open_backwards.add(number)
            queue_end_of_backward(lambda: self._end_backward(number))

    def reshard_all(self) -> None:
        """Release whatever nothing needs; pins are lifted. Between a backward and a forward only: what did not say that
        it ended (an exception in a backward, Ctrl-C in a forward) is over."""
        if current_backward_id() < 0:
            self._open_backwards.clear()
            for active in self._calls_in_backward.values():
                active.clear()
            for call in self._call_stack:
                for unit in call.units:
                    unit.users -= 1
            self._call_stack.clear()
            self._depth = 0
        for unit in self.units:
            unit.keep_unsharded = False
            self._reshard(unit, keep_if_reused=False)

    @contextmanager
    def unsharded(self, units: list[Unit], *, experts_only: bool = False, names: Sequence[str] = ()) -> Iterator[None]:
        """Keep `units` present; collective, as gathers are.

        Args:
            apart: over the ranks that hold the same experts, whose units they are; others may have none to read.
            names: of the parameters that are read; by default all of the first unit. Reports of hangs name them.
        """
        for unit in units:
            unit.users += 1
        try:
            with WaitScope("gather", names or (units[0].names if units else ())):  # the watchdog reports them
                self.scheduler.unshard_all(units, "parameters gathered whole", experts_only=experts_only)
                for unit in units:
                    unit.wait_for_unshard()
            self.after_unshard_all(expert_data_group(units) if experts_only else None)
            yield
        finally:
            for unit in units:
                unit.users -= 1
                self._reshard(unit, keep_if_reused=False)

    def _unshard(self, unit: Unit, *, backward: bool) -> None:
        if not unit.reshards:
            return
        self.prefetcher.record_use(unit)
        self.scheduler.unshard(unit, backward=backward)
        unit.wait_for_unshard(backward=backward)
        if unit.frees_memory:
            for other in self.prefetcher.units_to_prefetch(self.live_numel()):
                if not self.scheduler.prefetch(other, backward=backward):
                    break
            self.scheduler.advance()
            for other in self.prefetcher.units_to_read_ahead():
                if not other.read_ahead():
                    break

    def _reshard(self, unit: Unit, *, keep_if_reused: bool = True) -> None:
        if not unit.reshards or unit.users or unit.keep_unsharded or self._calls_in_backward[unit.index]:
            return
        if unit.shard_state is ShardState.SHARDED:
            return
        if keep_if_reused and self.prefetcher.is_reused_soon(unit, self.live_numel()):
            return
        unit.reshard()

    def _end_backward(self, number: int) -> None:
        self._open_backwards.discard(number)
        if self._open_backwards:
            return
        self._had_backward = True
        for active in self._calls_in_backward.values():
            active.clear()
        for unit in self.units:
            self._reshard(unit, keep_if_reused=False)
        for callback in self.on_backward_end:
            callback()
        self.scheduler.end_phase(BACKWARD)


def _is_view_of_unit(tensor: torch.Tensor, unit: Unit) -> bool:
    """Whether a tensor is a view into the memory of `full`."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    return tensor.untyped_storage().data_ptr() == unit.full.untyped_storage().data_ptr()
