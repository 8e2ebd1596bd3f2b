"""Disk tier that continues after a failure until all ranks check for failures together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from windlass.base.errors import DamageError, StorageError
from windlass.base.log import logger
from windlass.base.pending import Pending
from windlass.kernels.page_sums import PageSums
from windlass.storage.disk_tier import DiskTier
from windlass.storage.extent_transfer import Extent

_NEGATIVE_ZERO_IS_NAN = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)  # their only NaN has the bit pattern of -0


class DeferredFailureTier(DiskTier):
    """Disk tier whose failed transfers raise no error where they are awaited.

    [Note: a disk that fails] Ranks issue collectives in the same order. A rank that raised between two
    collectives would leave the other ranks waiting until they time out. So a failed transfer is logged at once and
    recorded here, a failed read fills its tensor with NaN, and the rank continues to the next sync point at which all
    ranks exchange their state (zero/update/disk_health.py): the end of a forward, the norm before a step, the end of a
    step, a save or a load. All ranks raise at this sync point.

    Use of a closed tier, or of an extent of another tier, raises immediately.

    Attributes:
        failure: first failure of a transfer or an allocation since the last `take_failure`.
        damaged_extents: extents with lost contents, because a part was not written or was damaged on the disk, and the
            error of each.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.failure: StorageError | None = None
        self.damaged_extents: dict[Extent, StorageError] = {}
        self._unallocated: set[Extent] = set()  # extents for which the disk had no space

    def take_failure(self) -> StorageError | None:
        """Return the first failure since the last call and clear it."""
        found, self.failure = self.failure, None
        return found

    def allocate(self, nbytes: int, name: str) -> Extent:
        """Allocate as `DiskTier.allocate` does.

        If there is too little space, record a failure and return an extent whose transfers all fail.
        """
        self._transfers.check_usable()
        try:
            return super().allocate(nbytes, name)
        except StorageError as error:
            self._record_failure(error)
            extent = Extent(name, nbytes, 0, 0)
            self._unallocated.add(extent)
            return extent

    def reserve(self, nbytes: int) -> None:
        """Reserve as `DiskTier.reserve` does. Record a failure if there is too little space."""
        self._transfers.check_usable()
        try:
            super().reserve(nbytes)
        except StorageError as error:
            self._record_failure(error)

    def free(self, extent: Extent) -> None:
        """Free as `DiskTier.free` does."""
        self.damaged_extents.pop(extent, None)
        if extent in self._unallocated:
            self._unallocated.discard(extent)
        else:
            super().free(extent)

    def discard(self, extent: Extent) -> None:
        """Discard as `DiskTier.discard` does. The extent no longer counts as damaged."""
        self.damaged_extents.pop(extent, None)
        if extent not in self._unallocated:
            super().discard(extent)

    def write(self, extent: Extent, offset: int, source: torch.Tensor, *, sums: PageSums | None = None) -> Pending:
        """Write as `DiskTier.write` does."""
        self._check_extent(extent)

        def failed(error: StorageError) -> None:
            self.damaged_extents.setdefault(extent, error)
            self._record_failure(error)

        return _DeferredFailureTransfer(
            lambda: super(DeferredFailureTier, self).write(extent, offset, source, sums=sums), failed
        )

    def read(self, extent: Extent, offset: int, into: torch.Tensor, *, sums: PageSums | None = None) -> Pending:
        """Read as `DiskTier.read` does. A failed read fills `into` with NaN."""
        self._check_extent(extent)

        return _DeferredFailureTransfer(
            lambda: super(DeferredFailureTier, self).read(extent, offset, into, sums=sums),
            lambda error: self._fail_read(extent, into, error),
        )

    def compare(self, extent: Extent, sums: PageSums) -> None:
        """Compare as `DiskTier.compare` does. If a page is damaged, `sums.memory` is filled with NaN."""
        try:
            super().compare(extent, sums)
        except DamageError as error:
            self._fail_read(extent, sums.memory, error)

    def _fail_read(self, extent: Extent, into: torch.Tensor, error: StorageError) -> None:
        nan = 0x80 if into.dtype in _NEGATIVE_ZERO_IS_NAN else 0xFF  # the byte gives NaN in every floating-point dtype
        into.detach().reshape(-1).view(torch.uint8).fill_(nan)
        extent.failed_reads += 1
        if isinstance(error, DamageError):  # other errors may be temporary, and the bytes on the disk intact
            self.damaged_extents.setdefault(extent, error)
        self._record_failure(error)

    def _check_extent(self, extent: Extent) -> None:
        self._transfers.check_usable(None if extent in self._unallocated else extent)

    def _record_failure(self, error: StorageError) -> None:
        logger.error("%s", error)
        self.failure = self.failure or error


class _DeferredFailureTransfer:
    """Pending transfer that finishes without an error even if the inner transfer fails.

    Args:
        start: starts a transfer.
        on_failure: called once with the error of a failed transfer.
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
        """Call `act`, and pass its StorageError to `on_failure`. Return True if it failed or returned a true value."""
        try:
            return bool(act())
        except StorageError as error:
            self._inner = None
            self._on_failure(error)
            return True
