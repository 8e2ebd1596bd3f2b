"""A disk tier that goes on after a failure, until all ranks can hear of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from windlass.base.errors import DamageError, StorageError
from windlass.base.log import logger
from windlass.base.pending import Pending
from windlass.storage.disk_tier import DiskTier
from windlass.storage.extent_transfer import Extent


class DeferredFailureTier(DiskTier):
    """A disk tier whose transfers end, well or not, without an error where they are awaited.

    [Note: a disk that fails] Ranks do their work in one order. One that raised in the middle of it would leave the
    others waiting for what it owes them until they time out. So a failed transfer is logged at once and noted here,
    what was to be read becomes NaN, and the rank goes on to the next point at which all ranks ask each other
    (zero/core/disk_health.py): the end of a forward, the norm before a step, the end of a step, a save. There all of them raise.

    What is wrong in the call itself (a closed tier, an extent of another) is raised as ever.

    Attributes:
        failure: the first transfer that failed since `take_failure`.
        torn: extents of which a part was not written, or was damaged on the disk, and why: what they should hold is
            lost.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.failure: StorageError | None = None
        self.damaged_extents: dict[Extent, StorageError] = {}
        self._unallocated: set[Extent] = set()  # for which there was no space

    def take_failure(self) -> StorageError | None:
        """The first failure since the last call, which is hereby told."""
        found, self.failure = self.failure, None
        return found

    def allocate(self, nbytes: int, name: str) -> Extent:
        """As `DiskTier.allocate`; what finds no space is a failure of every transfer of it."""
        self._transfers.check_usable()
        try:
            return super().allocate(nbytes, name)
        except StorageError as error:
            self._record_failure(error)
            extent = Extent(name, nbytes, 0, 0)
            self._unallocated.add(extent)
            return extent

    def reserve(self, nbytes: int) -> None:
        """As `DiskTier.reserve`; too little space is noted."""
        self._transfers.check_usable()
        try:
            super().reserve(nbytes)
        except StorageError as error:
            self._record_failure(error)

    def free(self, extent: Extent) -> None:
        """As `DiskTier.free`."""
        self.damaged_extents.pop(extent, None)
        if extent in self._unallocated:
            self._unallocated.discard(extent)
        else:
            super().free(extent)

    def discard(self, extent: Extent) -> None:
        """As `DiskTier.discard`; what was torn is to be written anew."""
        self.damaged_extents.pop(extent, None)
        if extent not in self._unallocated:
            super().discard(extent)

    def write(self, extent: Extent, offset: int, source: torch.Tensor) -> Pending:
        """As `DiskTier.write`."""
        self._check_extent(extent)

        def failed(error: StorageError) -> None:
            self.damaged_extents.setdefault(extent, error)
            self._record_failure(error)

        return _DeferredFailureTransfer(lambda: super(DeferredFailureTier, self).write(extent, offset, source), failed)

    def read(self, extent: Extent, offset: int, into: torch.Tensor) -> Pending:
        """As `DiskTier.read`; `into` is NaN where that fails."""
        self._check_extent(extent)

        def failed(error: StorageError) -> None:
            into.detach().reshape(-1).view(torch.uint8).fill_(0xFF)  # NaN in every floating-point dtype
            if isinstance(error, DamageError):  # another error may pass, and the bytes be there still
                self.damaged_extents.setdefault(extent, error)
            self._record_failure(error)

        return _DeferredFailureTransfer(lambda: super(DeferredFailureTier, self).read(extent, offset, into), failed)

    def _check_extent(self, extent: Extent) -> None:
        self._transfers.check_usable(None if extent in self._unallocated else extent)

    def _record_failure(self, error: StorageError) -> None:
        logger.error("%s", error)
        self.failure = self.failure or error


class _DeferredFailureTransfer:
    """Finished also where what it stands for failed.

    Args:
        start: starts a transfer.
        failed: is told, once, what went wrong.
    """

    def __init__(self, start: Callable[[], Pending], on_failure: Callable[[StorageError], None]) -> None:
        self._inner: Pending | None = None
        self._on_failure = on_failure
        self._attempt(lambda: setattr(self, "_inner", start()))

    def poll(self) -> bool:
        inner = self._inner
        done = inner is None or self._attempt(inner.poll)
        if done:
            self._inner = None
        return done

    def wait(self) -> None:
        if self._inner is not None:
            self._attempt(self._inner.wait)
            self._inner = None

    def _attempt(self, act: Callable[[], Any]) -> bool:
        """Whether it returned something true, or failed."""
        try:
            return bool(act())
        except StorageError as error:
            self._inner = None
            self._on_failure(error)
            return True
