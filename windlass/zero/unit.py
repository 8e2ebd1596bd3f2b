"""A unit: parameters that are gathered, reduced and stepped together, as views into one flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum

import torch
from torch import nn

from windlass.base.activity import During
from windlass.base.errors import ModelError
from windlass.base.memory import Ledger
from windlass.base.pending import DONE, Pending
from windlass.comm.groups import Group
from windlass.comm.transport import Buffer, Need, Transport, cut
from windlass.parallel.placement import Kind, placement_of
from windlass.storage.slot import Home, Slot
from windlass.zero.access import Released, mark_present, mark_released, put_data, raw_data
from windlass.zero.family import Family
from windlass.zero.layout import Layout, Piece
from windlass.zero.partition import Block, Plan


class Presence(Enum):
    """Where the whole parameters of a unit are."""

    RELEASED = "released"
    COMING = "coming"
    PRESENT = "present"


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
        plan: Plan,
        layout: Layout,
        compute: torch.dtype,
        family: Family,
        *,
        released: bool,
        home: Home = Home.DEVICE,
        state_home: Home = Home.DEVICE,
    ) -> None:
        self.index, self.names, self.parameters = index, plan.names, plan.parameters
        self.blocks: list[Block] = list(plan.blocks)
        self.layout, self.dtype, self.trainable, self.kept = layout, compute, plan.trainable, plan.kept
        self.lowered = plan.lowered
        self.shapes = [p.shape for p in plan.parameters]
        self.family, self.placements = family, [placement_of(p) for p in plan.parameters]
        self.sums: list[Group] = []
        self.share = 1.0
        self.speaks = True
        self.released = released
        self.presence = Presence.PRESENT
        self.users = 0  # blocks now between their gather and their release
        self.pinned = False  # a graph of gradients may come back to it at any time
        self.state_start, self.state_stop = 0, layout.padded
        self.home, self.state_home = home, state_home
        self.rests: Slot | None = None
        self.secondary: torch.Tensor | None = None
        self.exposed: dict[int, torch.Tensor] = {}  # by parameter, values when a script read `.data` since the gather
        self.lost_edit = ""  # a parameter that was changed through `.data` before it was released
        self.lent: set[int] = set()  # parameters that hold a private copy inside GatheredParameters
        self.adopt: Callable[[Unit], bool] | None = None  # set by the runtime: gather it for whoever runs now
        self.in_order: Callable[[Pending], Pending] = lambda pending: pending  # set by the order
        self.brought = False  # gathered before anybody here needed it
        self._pending: Pending = DONE
        self._secondary_valid = False  # the second copy is of the present values
        self._gathered = True  # on all ranks, since the values changed
        self.renewed = 0  # times that the cut was given new values

    @property
    def transport(self) -> Transport:
        """Over the ranks that it is cut over."""
        return self.family.transport

    @property
    def numel(self) -> int:
        """Elements of the parameters, padding left out."""
        return self.layout.numel

    @property
    def nbytes(self) -> int:
        """Bytes of `full`."""
        return self.layout.padded * self.dtype.itemsize

    @property
    def kind(self) -> Kind:
        """What decides who else has it, and who reduces it."""
        return self.placements[0].kind

    def need(self) -> Need:
        """The buffer to allocate for `full`."""
        away = self.released and self.home is not Home.DEVICE
        return Need(self.layout.padded, self.dtype, common=self.released and not away, transient=self.released)

    def bind(
        self,
        buffer: Buffer,
        ledger: Ledger,
        rests: Callable[[Unit, int], Slot],
    ) -> None:
        """Take `buffer` for `full`; its content is set by `views` and `settle_in` afterwards.

        Args:
            rests: makes a slot of so many elements for a cut whose `full` is freed.
        """
        self.buffer, self.full, self._ledger = buffer, buffer.local, ledger
        self.frees = self.released and not buffer.common
        self._hold(self.nbytes)
        if self.frees:
            self.transport.occupy(buffer)
            self.rests = rests(self, self.own_full.numel())
            self.rests.describe(self._names_at_rest)
        self._look()
        self._regather = self.family.regather if self.frees else None
        if self._regather is not None:
            near = self._regather.group
            self.secondary = torch.empty_like(cut(self.full, near.index, near.size))

    def move(self, buffer: Buffer) -> None:
        """Take another `buffer` for `full`, with the same values; of a unit that is never released."""
        self.take_back()
        buffer.local.copy_(self.full)
        self.buffer, self.full = buffer, buffer.local
        self._look()
        self.point()

    def _look(self) -> None:
        self._views = [
            self.full.narrow(0, offset, numel).view(shape)
            for offset, numel, shape in zip(self.layout.offsets, self.layout.numels, self.shapes, strict=True)
        ]

    @property
    def own_full(self) -> torch.Tensor:
        """This rank's cut of `full`, over the transport's group."""
        return cut(self.full, self.transport.group.index, self.transport.group.size)

    def read_cut(self) -> torch.Tensor:
        """This rank's cut of the parameters in memory; change it and give it to `write_cut`."""
        return self.rests.read() if self.rests is not None else self.own_full

    def write_cut(self, values: torch.Tensor) -> None:
        """Put what `read_cut` gave back."""
        if self.rests is not None:
            self.rests.write(values)

    def views(self) -> list[torch.Tensor]:
        """The parameters' places in `full`, shaped; valid while present."""
        return self._views

    def keep_cut(self, values: torch.Tensor) -> None:
        """Take this rank's cut, in the compute dtype and on the device, to where it rests while `full` is freed."""
        assert self.rests is not None
        self.rests.put(values).wait()

    def settle_in(self) -> None:
        """After the cut was filled for the first time: point the parameters, let the rest go."""
        self.point()
        if self.released:
            if not self.frees:
                self.transport.publish(self.buffer)
            self.let_go()

    def read_ahead(self) -> bool:
        """Start to read this rank's cut from disk, for the next gather; False if there is no room for it."""
        return self.rests is None or self.rests.read_ahead()

    def gather(self, *, backward: bool = False) -> None:
        """Start to make the parameters present; `await_present` finishes that."""
        if self.presence is Presence.RELEASED:
            self._start(backward=backward)

    def join(self, *, backward: bool = False) -> None:
        """Take part in a gather that some rank needs, whether the parameters are present here or not."""
        if self.presence is not Presence.RELEASED:
            self.await_present()
        self._start(backward=backward)

    def _start(self, *, backward: bool) -> None:
        here = self.presence is Presence.PRESENT  # then peers' cuts come once more, the same as they are
        self._pending = self._gathering(here, backward=backward)
        if not here:  # not before: where there is no memory for it, it is as it was
            self.presence = Presence.COMING

    def _gathering(self, here: bool, *, backward: bool) -> Pending:
        if self.rests is None:
            return self.transport.gather(self.buffer, elements=self.numel)
        if not here:
            self._hold(self.nbytes)
            self.transport.occupy(self.buffer)
        # whether nearer ranks are asked must be the same on all, whatever each of them released
        if backward and self._regather is not None and self.secondary is not None and self._gathered:
            if not here:
                group = self._regather.group
                cut(self.full, group.index, group.size).copy_(self.secondary)
            return self.in_order(self._regather.gather(self.buffer, elements=self.numel))
        self._gathered = True
        fetched = DONE if here else self.rests.fetch(self.own_full)
        with During("gather", self.names):
            return self.in_order(self.transport.gather(self.buffer, elements=self.numel, ready=fetched))

    def await_present(self, *, backward: bool = False) -> None:
        """Gather if nobody has, wait, and point the parameters at their values."""
        if self.presence is Presence.PRESENT:
            return
        self.gather(backward=backward)
        with During("gather", self.names):
            self._pending.wait()
        self._pending = DONE
        self.point()

    def let_go(self, *, stale: bool = False) -> None:
        """Release: the parameters lose their values, and the memory of `full` goes back.

        Args:
            stale: the cut at rest has newer values than `full`, so that no second copy may be taken from it.
        """
        self._pending.wait()
        self._pending, self.brought = DONE, False
        if self._regather is not None and self.secondary is not None and not self._secondary_valid and not stale:
            near = self._regather.group
            self.secondary.copy_(cut(self.full, near.index, near.size))
            self._secondary_valid = True
        if self.exposed:
            self._note_changes()
        for index, parameter in enumerate(self.parameters):
            if index not in self.lent:
                mark_released(parameter, self)
        self.presence = Presence.RELEASED
        if self.frees:
            self.transport.vacate(self.buffer)
            self._hold(0)

    def expose(self, index: int) -> None:
        """A script reads `.data` of a gathered parameter: find out, when it is released, whether it changed values."""
        if self.presence is Presence.PRESENT and index not in self.lent and index not in self.exposed:
            self.exposed[index] = self._views[index].clone()

    def _note_changes(self) -> None:
        """Note parameters that were changed through `.data`. Their versions stay: a backward would refuse them."""
        for index, before in self.exposed.items():
            if not torch.equal(before, self._views[index]):
                self.lost_edit = self.lost_edit or self.names[index]
        self.exposed.clear()

    def updated(self) -> None:
        """The cut has new values, which peers may gather."""
        self.renewed += 1
        self._secondary_valid = self._gathered = False
        if self.released and not self.frees:
            self.transport.publish(self.buffer)

    def _hold(self, nbytes: int) -> None:
        self._ledger.hold(f"parameters of {self.names[0]}", nbytes)

    def bring(self, parameter: nn.Parameter, together: Sequence[torch.Tensor]) -> bool:
        """As `Keeper`: inside a forward, and from then on tied to the block that runs."""
        return self.adopt is not None and self.adopt(self)

    def name_of(self, parameter: nn.Parameter) -> str:
        """As `Keeper`."""
        return next((n for n, p in zip(self.names, self.parameters, strict=True) if p is parameter), "?")

    def point(self) -> None:
        """Make the parameters views of `full`, which has their values."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if index in self.lent:
                continue
            if isinstance(parameter, Released):
                mark_present(parameter)
            put_data(parameter, view)
        self.presence = Presence.PRESENT

    def take_back(self) -> None:
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

    def pieces(self) -> Iterator[Piece]:
        """This rank's parts of the parameters, within its state span."""
        return self.layout.pieces(self.state_start, self.state_stop)

    def names_in(self, start: int, stop: int) -> Iterator[str]:
        """Names of the parameters in elements `[start, stop)` of the whole unit, quoted."""
        return (repr(self.names[piece.index]) for piece in self.layout.pieces(start, stop))

    def _names_at_rest(self, start: int, stop: int) -> Iterator[str]:
        begin, _ = self.layout.cut(self.transport.group.index, self.transport.group.size)
        return self.names_in(begin + start, begin + stop)

    def own_cut(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's state span of a flat tensor over the whole unit."""
        return flat[self.state_start : self.state_stop]

    def parameter_view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """The place of one parameter in a flat tensor over the whole unit, shaped."""
        return flat.narrow(0, self.layout.offsets[index], self.layout.numels[index]).view(self.shapes[index])


def sharers(units: Sequence[Unit]) -> Group | None:
    """The data ranks of units of experts, who read and set them by themselves; None where other units are among them,
    whose ranks are all."""
    return units[0].family.mesh.data if units and all(unit.kind.expert for unit in units) else None
