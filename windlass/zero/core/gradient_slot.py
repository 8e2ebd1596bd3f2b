"""The gradient of one unit: where it arrives, where its reduced cut rests, and what is known of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from windlass.base.pending import DONE, Pending
from windlass.comm.transport import TransportBuffer
from windlass.storage.slot import Slot
from windlass.zero.core.unit import Unit


@dataclass(eq=False)
class GradientSlot:
    """The gradient of one unit.

    Attributes:
        buffer: `[padded]`, where gradients arrive: the unit's own, or borrowed from the ring.
        place: of the ring's, if borrowed.
        aside: `[padded]` private, for gradients that must outlive the ring: kept back by `no_sync`, or too many at
        once.
        shard: `[state span]`, reduced, in the device's memory; a view of `buffer` where that is the unit's own.
        rests: the same where it leaves the device, or is kept on disk; `shard` is None then.
        spare: a second place for what `rests` or `shard` has, where updates are delayed.
        handed: whether `spare` has a gradient that an update under way steps; None: no update is under way.
        holds: `shard` (or what rests) has this step's gradient, or will once what is under way has landed.
        landed: a part of this step's gradient was sent to where it rests.
        written: parameters that have something in `buffer` or `aside`, not yet reduced.
        arrived: parameters whose gradient came in this backward.
        used: parameters that had a gradient in this step.
        dropped: parameters of which the script dropped what is in `shard` (or what rests): zeroed before it is used.
        squares: sum of squares of this rank's cut of the shard, once it was reduced.
    """

    unit: Unit
    buffer: TransportBuffer | None = None
    ring_index: int | None = None
    unreduced_copy: torch.Tensor | None = None
    shard: torch.Tensor | None = None
    storage: Slot | None = None
    spare_storage: Slot | None = None
    handed_over: bool | None = None
    has_reduced: bool = False
    is_offloaded: bool = False
    written: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    norm_squares: torch.Tensor | None = None

    @property
    def complete(self) -> bool:
        return len(self.arrived) == len(self.unit.parameters)

    @property
    def numel(self) -> int:
        """Elements of the reduced cut."""
        if self.shard is not None:
            return self.shard.numel()
        assert self.storage is not None
        return self.storage.numel

    @property
    def stepped(self) -> Slot | torch.Tensor | None:
        """What an update steps: the reduced cut where it is now, or as it was handed over; None: no gradient."""
        if self.handed_over is not None:
            return self.spare_storage if self.handed_over else None
        return (self.storage if self.storage is not None else self.shard) if self.has_reduced else None

    def names_in(self, start: int, stop: int) -> Iterator[str]:
        """Names of the parameters in elements `[start, stop)` of the reduced cut, quoted."""
        return self.unit.names_in(self.unit.state_start + start, self.unit.state_start + stop)

    def hand_over(self) -> Pending:
        """Start to give the reduced cut to an update that goes on while the next gradient arrives."""
        moving: Pending = DONE
        assert self.spare_storage is not None
        if self.has_reduced and self.storage is not None:
            self.storage, self.spare_storage = self.spare_storage, self.storage
        elif self.has_reduced:
            assert self.shard is not None
            moving = self.spare_storage.put(self.shard)
        self.handed_over = self.has_reduced
        return moving

    def read(self) -> torch.Tensor:
        """The reduced cut in memory, wherever it rests; change it and give it to `write`."""
        if self.storage is not None:
            return self.storage.read()
        assert self.shard is not None
        return self.shard

    def write(self, values: torch.Tensor) -> None:
        """Put what `read` gave back; the norm is measured again."""
        if self.storage is not None:
            self.storage.write(values)
        self.norm_squares = None
