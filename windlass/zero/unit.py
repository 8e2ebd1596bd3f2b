"""A unit: parameters that are gathered, reduced and stepped together, as views into one flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum

import torch

from windlass.base.pending import DONE, Pending
from windlass.comm.transport import Buffer, Need, Transport, cut
from windlass.zero.access import Released, mark_present, mark_released
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
    it is one buffer for all ranks, each owning its cut, and a gather only waits until the owners have updated. On a
    wire its storage is resized to zero and back: views that autograd saved alias that storage, so they hold the right
    values again after the gather before their backward; it is never lent to another unit. A released parameter keeps
    its shape but all its elements are one NaN (see access.py), so that no use of it can go unnoticed.

    Attributes:
        full: `[layout.padded]` in the compute dtype; parameters are views of it while present.
        shard: `[cut]`, this rank's cut of the parameters in the compute dtype; a view of `full` unless `full` is freed.
        master: `[state span]` float32, what the optimizer steps; the shard itself where that is wide enough already.
        frees: releasing gives memory back (else only the names go).
    """

    def __init__(self, index: int, plan: Plan, layout: Layout, compute: torch.dtype, *, released: bool) -> None:
        self.index, self.names, self.parameters = index, plan.names, plan.parameters
        self.blocks: list[Block] = list(plan.blocks)
        self.layout, self.dtype, self.trainable, self.kept = layout, compute, plan.trainable, plan.kept
        self.shapes = [p.shape for p in plan.parameters]
        self.released = released
        self.presence = Presence.PRESENT
        self.users = 0  # blocks now between their gather and their release
        self.pinned = False  # a graph of gradients may come back to it at any time
        self.state_start, self.state_stop = 0, layout.padded
        self.master: torch.Tensor | None = None
        self.secondary: torch.Tensor | None = None
        self.lent: set[int] = set()  # parameters that hold a private copy inside GatheredParameters
        self.adopt: Callable[[Unit], bool] | None = None  # set by the runtime: gather it for whoever runs now
        self._pending: Pending = DONE
        self._secondary_valid = False

    @property
    def numel(self) -> int:
        """Elements of the parameters, padding left out."""
        return self.layout.numel

    @property
    def nbytes(self) -> int:
        """Bytes of `full`."""
        return self.layout.padded * self.dtype.itemsize

    def need(self, transport: Transport) -> Need:
        """The buffer to allocate for `full`."""
        return Need(self.layout.padded, self.dtype, common=self.released)

    def bind(self, buffer: Buffer, transport: Transport, regather: Transport | None) -> None:
        """Take `buffer` for `full`; its content is set by `views` and `settle_in` afterwards."""
        self.buffer, self.full, self.transport = buffer, buffer.local, transport
        group = transport.group
        self.frees = self.released and not buffer.common
        if self.frees:
            self.full.untyped_storage().resize_(self.nbytes)
        own = cut(self.full, group.index, group.size)
        self.shard = torch.empty_like(own) if self.frees else own
        self._views = [
            self.full.narrow(0, offset, numel).view(shape)
            for offset, numel, shape in zip(self.layout.offsets, self.layout.numels, self.shapes, strict=True)
        ]
        self._regather = regather if self.frees else None
        if self._regather is not None:
            near = self._regather.group
            self.secondary = torch.empty_like(cut(self.full, near.index, near.size))

    def views(self) -> list[torch.Tensor]:
        """The parameters' places in `full`, shaped; valid while present."""
        return self._views

    def settle_in(self) -> None:
        """After `full` was filled for the first time: keep the shard, point the parameters, let the rest go."""
        if self.frees:
            self.shard.copy_(cut(self.full, self.transport.group.index, self.transport.group.size))
        self._point()
        if self.released:
            self.transport.publish(self.buffer)
            self.let_go()

    def gather(self, *, backward: bool = False) -> None:
        """Start to make the parameters present; `await_present` finishes that."""
        if self.presence is not Presence.RELEASED:
            return
        self.presence = Presence.COMING
        if not self.frees:
            self._pending = self.transport.gather(self.buffer, elements=self.numel)
            return
        self.full.untyped_storage().resize_(self.nbytes)
        transport, source = self.transport, self.shard
        if backward and self._regather is not None and self.secondary is not None and self._secondary_valid:
            transport, source = self._regather, self.secondary
        group = transport.group
        cut(self.full, group.index, group.size).copy_(source)
        self._pending = transport.gather(self.buffer, elements=self.numel)

    def await_present(self, *, backward: bool = False) -> None:
        """Gather if nobody has, wait, and point the parameters at their values."""
        if self.presence is Presence.PRESENT:
            return
        self.gather(backward=backward)
        self._pending.wait()
        self._pending = DONE
        self._point()

    def let_go(self, *, stale: bool = False) -> None:
        """Release: the parameters lose their values, and the memory of `full` goes back.

        Args:
            stale: the shard has newer values than `full`, so that no second copy may be taken from it.
        """
        if self.presence is not Presence.PRESENT:
            self._pending.wait()
        if self._regather is not None and self.secondary is not None and not self._secondary_valid and not stale:
            near = self._regather.group
            self.secondary.copy_(cut(self.full, near.index, near.size))
            self._secondary_valid = True
        for index, parameter in enumerate(self.parameters):
            if index not in self.lent:
                mark_released(parameter, self)
        self.presence = Presence.RELEASED
        if self.frees:
            self.full.untyped_storage().resize_(0)

    def updated(self) -> None:
        """The shard has new values: write them where peers gather them from."""
        self._secondary_valid = False
        if self.released:
            self.transport.publish(self.buffer)

    def _point(self) -> None:
        for index, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if index in self.lent:
                continue
            if isinstance(parameter, Released):
                mark_present(parameter)
            parameter.data = view
        self.presence = Presence.PRESENT

    def pieces(self) -> Iterator[Piece]:
        """This rank's parts of the parameters, within its state span."""
        return self.layout.pieces(self.state_start, self.state_stop)

    def own_cut(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's state span of a flat tensor over the whole unit."""
        return flat[self.state_start : self.state_stop]

    def parameter_view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """The place of one parameter in a flat tensor over the whole unit, shaped."""
        return flat.narrow(0, self.layout.offsets[index], self.layout.numels[index]).view(self.shapes[index])
