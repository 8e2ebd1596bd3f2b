"""Pool of host buffers through which the tensors of a disk tier are transferred."""

from __future__ import annotations

import threading

import torch

from windlass.base.pending import DONE, Pending
from windlass.storage.disk_tier import DiskTier

_GRAIN = 1 << 16  # bytes: sizes are rounded up, so that buffers of similar size are interchangeable
_WASTE = 2  # maximum ratio of the size of a reused buffer to the request; larger buffers are kept for larger requests


class StagingPool:
    """Pool of a disk tier's buffers.

    Buffers are allocated on demand and reused. Their total size stays within a limit, unless the buffers in use at once
    need more: a pool that refused a buffer would abort a step half way. Methods may be called from any thread.

    Args:
        disk: tier that allocates the buffers.
        limit: maximum total size of the buffers, in bytes.

    Attributes:
        peak: largest total size of the buffers so far, in bytes.
    """

    def __init__(self, disk: DiskTier, limit: int) -> None:
        self._disk, self.limit, self.peak = disk, limit, 0
        self._lock = threading.RLock()
        self._total = 0
        self._lent: dict[int, torch.Tensor] = {}  # buffers in use, by address
        self._free: list[torch.Tensor] = []
        self._returning: list[tuple[Pending, torch.Tensor]] = []
        self._leaving: set[int] = set()  # addresses of buffers that are freed once they return
        self._tracked: list[Pending] = []

    def has_room(self, nbytes: int) -> bool:
        """Return True if `nbytes` more can be acquired within the limit and without waiting.

        Raises:
            StorageError: a transfer that used a buffer failed.
        """
        with self._lock:
            self._collect_finished()
            return sum(map(torch.Tensor.numel, self._lent.values())) + nbytes <= self.limit

    def acquire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer `[numel]` with undefined contents. The caller must `release` it.

        Raises:
            StorageError: a transfer that used a buffer failed, or there is no memory for a new one.
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
        """Give back a buffer of `acquire`. It is reused once `after`, which may still use it, has finished."""
        with self._lock:
            self._returning.append((after, self._lent[_address(buffer)]))

    def track(self, transfer: Pending) -> None:
        """Make `wait_all` wait for a transfer whose buffer stays in use.

        If the transfer fails, the next `has_room`, `acquire` or `wait_all` raises its error.
        """
        with self._lock:
            self._tracked.append(transfer)

    def wait_all(self) -> None:
        """Wait until all transfers of released buffers and all tracked transfers have finished.

        Raises:
            StorageError: a transfer failed.
        """
        with self._lock:
            while self._returning:
                self._return_buffer(*self._returning.pop(0))
            while self._tracked:
                self._tracked.pop(0).wait()

    def free_returned(self) -> None:
        """Free the buffers that were released so far, each once its transfer has finished, instead of reusing them.

        Call it when buffers of their sizes are not needed again.
        """
        with self._lock:
            self._total -= sum(map(torch.Tensor.numel, self._free))
            self._free.clear()
            self._leaving.update(_address(buffer) for _, buffer in self._returning)

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
        if _address(buffer) in self._leaving:
            self._drop_buffer(buffer)
            return
        del self._lent[_address(buffer)]
        self._free.append(buffer)

    def _drop_buffer(self, buffer: torch.Tensor) -> None:
        """Remove a buffer from the pool: its transfer failed, or it is not needed again."""
        self._leaving.discard(_address(buffer))
        del self._lent[_address(buffer)]
        self._total -= buffer.numel()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
