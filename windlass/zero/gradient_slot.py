"""The gradient of one unit: where it arrives, where its reduced cut rests, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from windlass.comm.transport import Buffer
from windlass.storage.slot import Slot
from windlass.zero.unit import Unit


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
        holds: `shard` (or what rests) has this step's gradient, or will once what is under way has landed.
        landed: a part of this step's gradient was sent to where it rests.
        written: parameters that have something in `buffer` or `aside`, not yet reduced.
        arrived: parameters whose gradient came in this backward.
        used: parameters that had a gradient in this step.
        squares: sum of squares of this rank's cut of the shard, once it was reduced.
        late: it was incomplete at the end of a backward of this step, or something came twice.
    """

    unit: Unit
    buffer: Buffer | None = None
    place: int | None = None
    aside: torch.Tensor | None = None
    shard: torch.Tensor | None = None
    rests: Slot | None = None
    holds: bool = False
    landed: bool = False
    written: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    squares: torch.Tensor | None = None
    late: bool = False

    @property
    def complete(self) -> bool:
        return len(self.arrived) == len(self.unit.parameters)

    @property
    def numel(self) -> int:
        """Elements of the reduced cut."""
        if self.shard is not None:
            return self.shard.numel()
        assert self.rests is not None
        return self.rests.numel

    def read(self) -> torch.Tensor:
        """The reduced cut in memory, wherever it rests; change it and give it to `write`."""
        if self.rests is not None:
            return self.rests.read()
        assert self.shard is not None
        return self.shard

    def write(self, values: torch.Tensor) -> None:
        """Put what `read` gave back; the norm is measured again."""
        if self.rests is not None:
            self.rests.write(values)
        self.squares = None
