"""Gradient of one unit: its buffer, its reduced shard and their state."""

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
    """Gradient of one unit.

    Attributes:
        buffer: `[padded]`, accumulates gradients: the unit's own buffer, or one borrowed from the ring.
        ring_index: index of a borrowed buffer in the ring.
        unreduced_copy: `[padded]`, private, for gradients that must outlive the ring buffer: `no_sync`, or too
            many
            incomplete units.
        shard: `[state span]`, reduced, in device memory; a view of `buffer` if that is the unit's own.
        storage: slot of the reduced shard if it is on another tier; `shard` is None then.
        spare_storage: second slot, for delayed updates.
        handed_over: True if `spare_storage` has the gradient of a running update; None if no update is running.
        has_reduced: True if `shard` or `storage` has this step's gradient, or will have it after pending
            transfers.
        is_offloaded: True if a part of this step's gradient was sent to `storage`.
        written: parameters with unreduced gradients in `buffer` or `unreduced_copy`.
        arrived: parameters whose gradient arrived in this backward.
        used: parameters that had a gradient in this step.
        dropped: parameters whose reduced gradient the script dropped; zeroed before the shard is used.
        norm_squares: sum of squares of this rank's part of the shard, once it was reduced.
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
        """Number of elements of the reduced shard."""
        if self.shard is not None:
            return self.shard.numel()
        assert self.storage is not None
        return self.storage.numel

    @property
    def stepped(self) -> Slot | torch.Tensor | None:
        """Gradient that an update uses: the reduced shard, or the one handed over to a delayed update; None: no
        gradient.
        """
        if self.handed_over is not None:
            return self.spare_storage if self.handed_over else None
        return (self.storage if self.storage is not None else self.shard) if self.has_reduced else None

    def names_in(self, start: int, stop: int) -> Iterator[str]:
        """Return the quoted names of the parameters in elements `[start, stop)` of the reduced shard."""
        return self.unit.names_in(self.unit.state_start + start, self.unit.state_start + stop)

    def hand_over(self) -> Pending:
        """Start to hand the reduced shard to an update that runs while the next gradient arrives."""
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
        """Return the reduced shard in memory, from any tier. Pass the changed shard to `write`."""
        if self.storage is not None:
            return self.storage.read()
        assert self.shard is not None
        return self.shard

    def write(self, values: torch.Tensor) -> None:
        """Store the shard that `read` returned. Its norm is computed again."""
        if self.storage is not None:
            self.storage.write(values)
        self.norm_squares = None
