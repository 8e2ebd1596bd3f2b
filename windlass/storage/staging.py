"""The host memory through which a disk tier's tensors pass: buffers that are lent, and used again once returned."""

from __future__ import annotations

import threading

import torch

from windlass.base.pending import DONE, Pending
from windlass.storage.tier import DiskTier

_GRAIN = 1 << 16  # bytes: buffers of nearly the same size serve each other
_WASTE = 2  # times what was asked for: a larger buffer would be lent for little, and missing elsewhere


class Staging:
    """Lends a tier's buffers.

    They are made as they are needed and kept for the next. All together stay within a limit, unless what is lent at
    once takes more: a lender of memory that refuses would stop a step half way. Methods may be called from any thread.

    Args:
        tier: makes the buffers.
        limit: bytes of all buffers together.

    Attributes:
        peak: the most bytes that all buffers together had.
    """

    def __init__(self, tier: DiskTier, limit: int) -> None:
        self._tier, self.limit, self.peak = tier, limit, 0
        self._lock = threading.RLock()
        self._total = 0
        self._lent: dict[int, torch.Tensor] = {}  # by address
        self._free: list[torch.Tensor] = []
        self._leaving: list[tuple[Pending, torch.Tensor]] = []
        self._watched: list[Pending] = []

    def room(self, nbytes: int) -> bool:
        """Whether `nbytes` more can be lent without waiting, and within the limit."""
        with self._lock:
            self._collect()
            return sum(map(torch.Tensor.numel, self._lent.values())) + nbytes <= self.limit

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`[numel]` of undefined content; give it back.

        Raises:
            StorageError: a transfer that had a buffer failed, or there is no memory for one.
        """
        nbytes = numel * dtype.itemsize
        with self._lock:
            self._collect()
            while True:
                fits = [buffer for buffer in self._free if nbytes <= buffer.numel() <= _WASTE * max(nbytes, _GRAIN)]
                if fits:
                    best = min(fits, key=torch.Tensor.numel)
                    self._free = [buffer for buffer in self._free if buffer is not best]
                    break
                while self._free and self._total + nbytes > self.limit:
                    self._total -= self._free.pop(0).numel()
                if self._total + nbytes <= self.limit or not self._leaving:
                    best = self._tier.buffer(-(-max(nbytes, 1) // _GRAIN) * _GRAIN)
                    self._total += best.numel()
                    self.peak = max(self.peak, self._total)
                    break
                self._return(*self._leaving.pop(0))
            self._lent[_address(best)] = best
            return best[:nbytes].view(dtype)

    def give_back(self, taken: torch.Tensor, after: Pending = DONE) -> None:
        """Return what `take` gave; it is lent again once `after`, which may still use it, is finished."""
        with self._lock:
            self._leaving.append((after, self._lent[_address(taken)]))

    def watch(self, transfer: Pending) -> None:
        """Have `settle` wait for a transfer whose buffer stays lent, and every call find out whether it failed."""
        with self._lock:
            self._watched.append(transfer)

    def settle(self) -> None:
        """Wait until whatever uses returned buffers, and whatever is watched, is finished.

        Raises:
            StorageError: a transfer failed.
        """
        with self._lock:
            while self._leaving:
                self._return(*self._leaving.pop(0))
            while self._watched:
                self._watched.pop(0).wait()

    def _collect(self) -> None:
        watched, self._watched = self._watched, []
        for number, transfer in enumerate(watched):
            try:
                over = transfer.poll()
            except BaseException:
                self._watched += watched[number + 1 :]
                raise
            self._watched += [] if over else [transfer]
        still: list[tuple[Pending, torch.Tensor]] = []
        leaving, self._leaving = self._leaving, []
        for number, (pending, buffer) in enumerate(leaving):
            try:
                finished = pending.poll()
            except BaseException:
                self._leaving = still + leaving[number + 1 :]
                self._drop(buffer)
                raise
            if finished:
                self._return(DONE, buffer)
            else:
                still.append((pending, buffer))
        self._leaving = still

    def _return(self, pending: Pending, buffer: torch.Tensor) -> None:
        try:
            pending.wait()
        except BaseException:
            self._drop(buffer)
            raise
        del self._lent[_address(buffer)]
        self._free.append(buffer)

    def _drop(self, buffer: torch.Tensor) -> None:
        """Part with a buffer whose transfer failed."""
        del self._lent[_address(buffer)]
        self._total -= buffer.numel()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
