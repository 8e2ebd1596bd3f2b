"""The host memory through which a disk tier's tensors pass: buffers that are lent, and used again once returned."""

from __future__ import annotations

import threading

import torch

from windlass.base.pending import DONE, Pending
from windlass.storage.disk_tier import DiskTier

_GRAIN = 1 << 16  # bytes: buffers of nearly the same size serve each other
_WASTE = 2  # times what was asked for: a larger buffer would be lent for little, and missing elsewhere


class StagingPool:
    """Lends a tier's buffers.

    They are made as they are needed and kept for the next. All together stay within a limit, unless what is lent at
    once takes more: a lender of memory that refuses would stop a step half way. Methods may be called from any thread.

    Args:
        tier: makes the buffers.
        limit: bytes of all buffers together.

    Attributes:
        peak: the most bytes that all buffers together had.
    """

    def __init__(self, disk: DiskTier, limit: int) -> None:
        self._disk, self.limit, self.peak = disk, limit, 0
        self._lock = threading.RLock()
        self._total = 0
        self._lent: dict[int, torch.Tensor] = {}  # by address
        self._free: list[torch.Tensor] = []
        self._returning: list[tuple[Pending, torch.Tensor]] = []
        self._tracked: list[Pending] = []

    def has_room(self, nbytes: int) -> bool:
        """Whether `nbytes` more can be lent without waiting, and within the limit."""
        with self._lock:
            self._collect_finished()
            return sum(map(torch.Tensor.numel, self._lent.values())) + nbytes <= self.limit

    def acquire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`[numel]` of undefined content; give it back.

        Raises:
            StorageError: a transfer that had a buffer failed, or there is no memory for one.
        """
        nbytes = numel * dtype.itemsize
        with self._lock:
            self._collect_finished()
            while True:
                fits = [buffer for buffer in self._free if nbytes <= buffer.numel() <= _WASTE * max(nbytes, _GRAIN)]
                if fits:
                    best = min(fits, key=torch.Tensor.numel)
                    self._free = [buffer for buffer in self._free if buffer is not best]
                    break
                while self._free and self._total + nbytes > self.limit:
                    self._total -= self._free.pop(0).numel()
                if self._total + nbytes <= self.limit or not self._returning:
                    best = self._disk.allocate_buffer(-(-max(nbytes, 1) // _GRAIN) * _GRAIN)
                    self._total += best.numel()
                    self.peak = max(self.peak, self._total)
                    break
                self._return_buffer(*self._returning.pop(0))
            self._lent[_address(best)] = best
            return best[:nbytes].view(dtype)

    def release(self, buffer: torch.Tensor, after: Pending = DONE) -> None:
        """Return what `take` gave; it is lent again once `after`, which may still use it, is finished."""
        with self._lock:
            self._returning.append((after, self._lent[_address(buffer)]))

    def track(self, transfer: Pending) -> None:
        """Have `settle` wait for a transfer whose buffer stays lent, and every call find out whether it failed."""
        with self._lock:
            self._tracked.append(transfer)

    def wait_all(self) -> None:
        """Wait until whatever uses returned buffers, and whatever is watched, is finished.

        Raises:
            StorageError: a transfer failed.
        """
        with self._lock:
            while self._returning:
                self._return_buffer(*self._returning.pop(0))
            while self._tracked:
                self._tracked.pop(0).wait()

    def _collect_finished(self) -> None:
        watched, self._tracked = self._tracked, []
        for number, transfer in enumerate(watched):
            try:
                over = transfer.poll()
            except BaseException:
                self._tracked += watched[number + 1 :]
                raise
            self._tracked += [] if over else [transfer]
        still: list[tuple[Pending, torch.Tensor]] = []
        leaving, self._returning = self._returning, []
        for number, (pending, buffer) in enumerate(leaving):
            try:
                finished = pending.poll()
            except BaseException:
                self._returning = still + leaving[number + 1 :]
                self._drop_buffer(buffer)
                raise
            if finished:
                self._return_buffer(DONE, buffer)
            else:
                still.append((pending, buffer))
        self._returning = still

    def _return_buffer(self, pending: Pending, buffer: torch.Tensor) -> None:
        try:
            pending.wait()
        except BaseException:
            self._drop_buffer(buffer)
            raise
        del self._lent[_address(buffer)]
        self._free.append(buffer)

    def _drop_buffer(self, buffer: torch.Tensor) -> None:
        """Part with a buffer whose transfer failed."""
        del self._lent[_address(buffer)]
        self._total -= buffer.numel()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
