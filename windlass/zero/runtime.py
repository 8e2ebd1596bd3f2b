"""The one place that decides when units are gathered and released."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from windlass.base.activity import During
from windlass.base.autograd import at_end_of_backward, current_backward
from windlass.base.tree import tensors
from windlass.comm.groups import Group
from windlass.zero.foresight import Foresight
from windlass.zero.order import BACKWARD, EVALUATION, FORWARD, Order
from windlass.zero.partition import Block
from windlass.zero.unit import Presence, Unit, sharers


@dataclass(eq=False)
class Call:
    """One call of a block: which units it uses, in its forward and again in its backward."""

    block: Block
    units: list[Unit] = field(default_factory=list)
    given: list[torch.Tensor] = field(default_factory=list)  # what it was called with, until it returns


class Runtime:
    """Gathers before use, releases after, in forward and backward.

    [Note: when a unit may go] After a forward, unless that runs inside a backward (recomputation). After the backward
    of
    a call, which is when the gradient of one of the block's inputs is complete: autograd runs ready nodes last made
    first, so by then every node of the block has run. A block whose inputs need no gradient keeps its units to the end
    of the outermost backward. "Its own gradients arrived" is no sign: a frozen weight is still needed by what lies
    below.
    """

    def __init__(self, units: list[Unit], blocks: list[Block], foresight: Foresight, order: Order) -> None:
        self.units = units
        self.foresight, self.order = foresight, order
        order.drop = self._release
        self.reduces: Callable[[], bool] = lambda: False  # whether the backward that begins will reduce gradients
        self.on_backward_begin: list[Callable[[], None]] = []
        self.on_backward_end: list[Callable[[], None]] = []
        self.held: Callable[[Group | None], None] = lambda among: None  # when what `holding` holds is present
        self._of_block: dict[int, list[Unit]] = {id(block): [] for block in blocks}
        for unit in units:
            unit.adopt = self.adopt
            if unit.released:
                for block in unit.blocks:
                    self._of_block[id(block)].append(unit)
        self._running: list[Call] = []
        self._depth = 0
        self._backwards: set[int] = set()
        self._active: dict[int, set[int]] = {unit.index: set() for unit in units}  # calls whose backward runs
        self._had_backward = False

    @property
    def in_forward(self) -> bool:
        """Whether the model runs forward now."""
        return self._depth > 0

    def present_elements(self) -> int:
        """Elements of releasable units that are present or coming."""
        return sum(u.numel for u in self.units if u.released and u.presence is not Presence.RELEASED)

    def enter_model(self) -> None:
        """The outermost module begins its forward."""
        self._depth += 1  # first: what ends a forward is called even where this fails
        if self._depth == 1 and current_backward() < 0:
            self.foresight.begin(complete=self._had_backward)
            self._had_backward = False
            self.order.begin(FORWARD if torch.is_grad_enabled() else EVALUATION, reduces=False)

    def exit_model(self) -> None:
        """The outermost module ended its forward, or failed in it."""
        self._depth -= 1
        if self._depth == 0:
            self._running.clear()
            self.order.end(FORWARD, EVALUATION)

    def enter_block(self, block: Block) -> Call:
        """Before a block runs: its units are present when this returns."""
        call = Call(block, list(self._of_block[id(block)]))
        self._running.append(call)
        if current_backward() >= 0:
            self.note_backward()  # a recomputation: the backward around it must be known before any nested one
        for unit in call.units:  # all at once: `exit_block` counts all of them off, also where this fails half-way
            unit.users += 1
        for unit in call.units:
            self._want(unit, backward=False)
        return call

    def exit_block(self, block: Block, output: object = None) -> Call | None:
        """After a block ran: its units go unless something still needs them, as who gets a view of a parameter does."""
        if not self._running or self._running[-1].block is not block:
            return None  # something failed before it was entered, and torch calls what comes after all the same
        call = self._running.pop()
        recomputing = current_backward() >= 0
        for unit in call.units:
            unit.users -= 1
            if self._running and unit.frees and any(_lies_in(tensor, unit) for tensor in tensors(output)):
                self.adopt(unit)
            if not recomputing:
                self._release(unit)
        return call

    def enter_backward(self, call: Call) -> None:
        """A gradient reached an output of `call`: its units are present when this returns."""
        self.note_backward()
        for unit in call.units:
            self._active[unit.index].add(id(call))
            if torch.is_grad_enabled():
                unit.pinned = True  # create_graph: nodes made now come back to its values at a time nobody knows
            self._want(unit, backward=True)

    def exit_backward(self, call: Call) -> None:
        """The gradient of an input of `call` is complete, so its backward is."""
        for unit in call.units:
            self._active[unit.index].discard(id(call))
            self._release(unit)

    def adopt(self, unit: Unit) -> bool:
        """Gather `unit` for a block that uses it without owning it, and tie it to that block; False outside a
        forward."""
        if not self._running:
            return False
        call = self._running[-1]
        if unit in call.units:
            return True
        self._of_block[id(call.block)].append(unit)
        unit.blocks.append(call.block)
        call.units.append(unit)
        unit.users += 1
        self._want(unit, backward=False)
        return True

    def keep_until_step(self, call: Call) -> None:
        """The backward of `call` will not be announced."""
        for unit in call.units:
            unit.pinned = True
            self._want(unit, backward=False)

    def note_backward(self) -> None:
        """Called by every hook that runs in a backward, so that its end is seen; nested ones count until all ended."""
        number = current_backward()
        if number >= 0 and number not in self._backwards:
            if not self._backwards and not self._depth:
                for callback in self.on_backward_begin:
                    callback()
                self.order.begin(BACKWARD, reduces=self.reduces())
            self._backwards.add(number)
            at_end_of_backward(lambda: self._end(number))

    def release_all(self) -> None:
        """Release whatever nothing needs; pins are lifted. Between a backward and a forward only: what did not say that
        it ended (an exception in a backward, Ctrl-C in a forward) is over."""
        if current_backward() < 0:
            self._backwards.clear()
            for active in self._active.values():
                active.clear()
            for call in self._running:
                for unit in call.units:
                    unit.users -= 1
            self._running.clear()
            self._depth = 0
        for unit in self.units:
            unit.pinned = False
            self._release(unit, soon=False)

    @contextmanager
    def holding(self, units: list[Unit], *, apart: bool = False, names: Sequence[str] = ()) -> Iterator[None]:
        """Keep `units` present; collective, as gathers are.

        Args:
            apart: over the ranks that hold the same experts, whose units they are; others may have none to read.
            names: of the parameters that are read; by default all of the first unit. Reports of hangs name them.
        """
        for unit in units:
            unit.users += 1
        try:
            with During("gather", names or (units[0].names if units else ())):  # the watchdog reports them
                self.order.together(units, "parameters gathered whole", apart=apart)
                for unit in units:
                    unit.await_present()
            self.held(sharers(units) if apart else None)
            yield
        finally:
            for unit in units:
                unit.users -= 1
                self._release(unit, soon=False)

    def _want(self, unit: Unit, *, backward: bool) -> None:
        if not unit.released:
            return
        self.foresight.wanted(unit)
        self.order.gather(unit, backward=backward)
        unit.await_present(backward=backward)
        if unit.frees:
            for other in self.foresight.next(self.present_elements()):
                if not self.order.ahead(other, backward=backward):
                    break
            self.order.go_on()
            for other in self.foresight.to_read():
                if not other.read_ahead():
                    break

    def _release(self, unit: Unit, *, soon: bool = True) -> None:
        if not unit.released or unit.users or unit.pinned or self._active[unit.index]:
            return
        if unit.presence is Presence.RELEASED:
            return
        if soon and self.foresight.wanted_soon(unit, self.present_elements()):
            return
        unit.let_go()

    def _end(self, number: int) -> None:
        self._backwards.discard(number)
        if self._backwards:
            return
        self._had_backward = True
        for active in self._active.values():
            active.clear()
        for unit in self.units:
            self._release(unit, soon=False)
        for callback in self.on_backward_end:
            callback()
        self.order.end(BACKWARD)


def _lies_in(tensor: torch.Tensor, unit: Unit) -> bool:
    """Whether a tensor is a view into the memory of `full`."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    return tensor.untyped_storage().data_ptr() == unit.full.untyped_storage().data_ptr()
