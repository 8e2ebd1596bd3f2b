"""Gradient of one unit: its buffer, its reduced shard, and the state of both."""

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
        buffer: `[padded]`, target of gradients: the unit's own, or borrowed from the ring of buffers that
            units share; None: not borrowed yet.
        ring_index: Index of the borrowed buffer in the ring; None if none is borrowed.
        unreduced_copy: `[padded]`, private memory for gradients that cannot stay in the ring: under `no_sync`, or if
            all ring buffers are lent.
        shard: `[state span]`, reduced, on the device; `[padded]` while gradients stay local. If `buffer` is the unit's
            own, a view of it, or a copy once the buffer is written again.
        storage: Host memory or file range of the reduced shard, if it is offloaded; `shard` is None then.
        spare_storage: Second storage, for the gradient that a delayed update uses.
        handed_over: True if `spare_storage` has a gradient that a running update uses, False if the running update has
            no gradient of the unit; None if no update runs.
        has_reduced: `shard` (or `storage`) has this step's gradient, or will have it once transfers in flight end.
        is_offloaded: A part of this step's gradient has been sent to `storage`.
        written: Indices of the parameters with an unreduced gradient in `buffer` or `unreduced_copy`.
        arrived: Indices of the parameters whose gradient arrived in this backward.
        used: Indices of the parameters that have a gradient in this step.
        dropped: Indices of the parameters whose reduced gradient the script dropped; zeroed before the next use.
        norm_squares: Sum of squares of this rank's part of the reduced shard; None if not computed yet.
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
        """Gradient for the optimizer: the reduced shard, or the one in use by a delayed update; None: no gradient."""
        if self.unit.unstepped:
            return None
        if self.handed_over is not None:
            return self.spare_storage if self.handed_over else None
        return (self.storage if self.storage is not None else self.shard) if self.has_reduced else None

    def names_in(self, start: int, stop: int) -> Iterator[str]:
        """Return the quoted names of the parameters in elements `[start, stop)` of the reduced shard."""
        return self.unit.names_in(self.unit.state_start + start, self.unit.state_start + stop)

    def hand_over(self) -> Pending:
        """Start to move the reduced shard to `spare_storage`, for an update that runs during the next backward."""
        moving: Pending = DONE
        assert self.spare_storage is not None
        if self.unit.unstepped:
            self.handed_over = False
            return moving
        if self.has_reduced and self.storage is not None:
            # Swap instead of copy: the update reads the filled storage, the next gradient goes to the free one.
            self.storage, self.spare_storage = self.spare_storage, self.storage
        elif self.has_reduced:
            assert self.shard is not None
            moving = self.spare_storage.put(self.shard)
        self.handed_over = self.has_reduced
        return moving

    def read(self) -> torch.Tensor:
        """Return the reduced shard in memory, from any tier. Pass it to `write` after a change."""
        if self.storage is not None:
            return self.storage.read()
        assert self.shard is not None
        return self.shard

    def write(self, values: torch.Tensor) -> None:
        """Store the shard that `read` returned. Its norm is computed again at the next use."""
        if self.storage is not None:
            self.storage.write(values)
        self.norm_squares = None
