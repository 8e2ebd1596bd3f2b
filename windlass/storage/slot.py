"""Slot: a named flat tensor of a unit in device memory, in host memory, or on NVMe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from weakref import WeakMethod

import torch

from windlass.base.device_memory import copy_to_device, copy_to_host, device_has_own_memory, empty_host_tensor
from windlass.base.pending import DONE, AllPending, ChainedPending, Pending
from windlass.base.trace_ranges import traced
from windlass.storage.disk_error_messages import abbreviate_names
from windlass.storage.disk_tier import DiskTier
from windlass.storage.extent_transfer import Extent
from windlass.storage.staging_pool import StagingPool


class Tier(Enum):
    """Storage of a slot: device memory, host memory or NVMe."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class Slot:
    """Flat tensor `[numel]` of a unit, stored on a tier.

    Args:
        name: its name in messages (`parameters of layers.3`).
        numel, dtype: size and dtype of the tensor.
        tier: place where it is stored. On a device without memory of its own, such as the CPU, HOST costs no copy.
        device: device that computes with it.
        disk: the disk tier, for NVME.
        staging: host buffers between the disk and a device with memory of its own.
        pin: page-lock host memory.

    Attributes:
        tensor: `[numel]` on DEVICE and HOST; None on NVME.
    """

    def __init__(
        self,
        name: str,
        numel: int,
        dtype: torch.dtype,
        tier: Tier,
        device: torch.device,
        *,
        disk: DiskTier | None = None,
        staging: StagingPool | None = None,
        pin: bool = True,
    ) -> None:
        tier = tier if numel else Tier.DEVICE  # an empty tensor needs no memory on any tier
        self.name, self.numel, self.dtype, self.tier, self._device = name, numel, dtype, tier, device
        self._pin, self._disk, self._staging = pin, disk, staging
        self.tensor: torch.Tensor | None = None
        self._discarded = False
        self._prefetched: tuple[torch.Tensor, Pending] | None = None
        self._kept_staged: list[tuple[int, torch.Tensor, Pending]] = []
        if tier is Tier.NVME:
            assert disk is not None
            self._extent = disk.allocate(self.nbytes, name)
        elif tier is Tier.HOST:
            self.tensor = empty_host_tensor(numel, dtype, pin=pin)
        else:
            self.tensor = torch.empty(numel, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.numel * self.dtype.itemsize

    def prefetch(self) -> bool:
        """Start to read the slot from disk to host memory for the next `fetch`. Return False if `staging` is full."""
        if self.tensor is None and self._prefetched is None:
            assert self._staging is not None
            if not self._staging.has_room(self.nbytes):
                return False
            if not self._is_fully_kept():
                self._prefetched = self._start_read(0, self.numel)
        return True

    def keep_staged(self, staged: torch.Tensor, start: int, written: Pending) -> None:
        """Keep the staging buffer `staged`, so that the next `fetch` of the full slot need not read the disk.

        Args:
            staged: values of elements `[start, start + staged.numel())`, which a `store` is writing to disk.
            written: pending write of these values.
        """
        assert self._staging is not None
        self._kept_staged.append((start, staged, written))
        self._staging.track(written)

    def set_content_description(self, names: Callable[[int, int], Iterable[str]]) -> None:
        """Set a bound method, held weakly, that names elements `[start, stop)` in messages about damage on disk."""
        if self.tensor is None:
            self._extent.describe_content = partial(_describe_content, WeakMethod(names), self.dtype.itemsize)

    def discard(self) -> None:
        """Mark the contents on disk, damaged or not, as lost. `read` returns zeros until the next write."""
        if self.tensor is None:
            assert self._disk is not None
            self.drop_staged()
            self._disk.discard(self._extent)
            self._discarded = True

    def drop_staged(self) -> None:
        """Release staging buffers that were prefetched or kept, because they no longer equal the contents on disk."""
        kept, self._kept_staged = self._kept_staged, []
        for _, staged, written in kept:
            assert self._staging is not None
            self._staging.release(staged, written)
        if self._prefetched is not None:
            (staged, loaded), self._prefetched = self._prefetched, None
            loaded.wait()
            assert self._staging is not None
            self._staging.release(staged)

    @property
    def extent(self) -> Extent | None:
        """Extent on disk; None on other tiers."""
        return self._extent if self.tensor is None else None

    @property
    def failed_reads(self) -> int:
        """Number of finished reads of this slot that failed, on a tier that defers failures."""
        return self._extent.failed_reads if self.tensor is None else 0

    def fetch(self, into: torch.Tensor, start: int = 0) -> Pending:
        """Start to copy elements `[start, start + into.numel())` to `into`, which is on the device."""
        if self.tensor is not None:
            source = self.tensor.narrow(0, start, into.numel())
            if self.tier is Tier.HOST and device_has_own_memory(self._device):
                with traced("fetch", self.name):
                    return copy_to_device(into, source)
            if into.data_ptr() != source.data_ptr():
                into.copy_(source)
            return DONE
        if into.numel() == self.numel and self._is_fully_kept():
            return self._copy_kept_to_device(into)
        if not device_has_own_memory(self._device) and self._prefetched is None:
            return self.load(into, start)
        staged, loaded = self._take_prefetched_or_read(start, into.numel())
        return ChainedPending(loaded, lambda: self._copy_to_device(into, staged))

    def put(self, source: torch.Tensor, start: int = 0) -> Pending:
        """Start to copy `source`, which is on the device, to elements `[start, start + source.numel())`."""
        if self.tensor is not None:
            target = self.tensor.narrow(0, start, source.numel())
            if self.tier is Tier.HOST and device_has_own_memory(self._device):
                with traced("store", self.name):
                    return copy_to_host(target, source)
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
            return DONE
        if not device_has_own_memory(self._device):
            return self.store(source, start)
        assert self._staging is not None
        staged = self._staging.acquire(source.numel(), self.dtype)
        return ChainedPending(copy_to_host(staged, source), lambda: self._store_and_release(staged, start))

    def load(self, into: torch.Tensor, start: int = 0) -> Pending:
        """Start to copy elements to `into` as `fetch` does, with `into` in host memory."""
        if self.tensor is not None:
            into.copy_(self.tensor.narrow(0, start, into.numel()))
            return DONE
        assert self._disk is not None
        return self._disk.read(self._extent, start * self.dtype.itemsize, into)

    def store(self, source: torch.Tensor, start: int = 0) -> Pending:
        """Start to copy `source` as `put` does, from host memory.

        `source` must not change before the transfer has finished.
        """
        if self.tensor is not None:
            self.tensor.narrow(0, start, source.numel()).copy_(source)
            return DONE
        assert self._disk is not None
        self._discarded = False
        stop = start + source.numel()
        if self._prefetched is not None or any(s < stop and start < s + k.numel() for s, k, _ in self._kept_staged):
            self.drop_staged()
        return self._disk.write(self._extent, start * self.dtype.itemsize, source)

    def read(self) -> torch.Tensor:
        """Return all values in memory: the tensor itself, or a copy of the contents on disk."""
        if self.tensor is not None:
            return self.tensor
        into = empty_host_tensor(self.numel, self.dtype, pin=False)
        if self._discarded:
            return into.zero_()
        self.load(into).wait()
        return into

    def read_unguarded(self, into: torch.Tensor) -> None:
        """Read the slot from disk to host memory, from any thread.

        Errors are raised here, also by a `DeferredFailureTier`.
        """
        assert self._disk is not None
        self._disk.read_unguarded(self._extent, 0, into)

    def write(self, values: torch.Tensor) -> None:
        """Write changed values that `read` returned."""
        if self.tensor is None or self.tensor.data_ptr() != values.data_ptr():
            self.store(values).wait()

    def _is_fully_kept(self) -> bool:
        """Return True if the kept buffers hold all elements. Kept buffers never overlap."""
        return sum(staged.numel() for _, staged, _ in self._kept_staged) == self.numel

    def _copy_kept_to_device(self, into: torch.Tensor) -> Pending:
        assert self._staging is not None
        kept, self._kept_staged = self._kept_staged, []
        copies = []
        for start, staged, written in kept:
            copies.append(copy_to_device(into.narrow(0, start, staged.numel()), staged))
            self._staging.release(staged, AllPending([copies[-1], written]))
        return AllPending(copies)

    def _take_prefetched_or_read(self, start: int, numel: int) -> tuple[torch.Tensor, Pending]:
        """Return a buffer with elements `[start, start + numel)` and its pending read.

        For the full slot, this is the prefetched buffer if there is one.
        """
        if self._prefetched is not None and numel == self.numel:
            found, self._prefetched = self._prefetched, None
            return found
        return self._start_read(start, numel)

    def _start_read(self, start: int, numel: int) -> tuple[torch.Tensor, Pending]:
        assert self._staging is not None
        staged = self._staging.acquire(numel, self.dtype)
        try:
            return staged, self.load(staged, start)
        except BaseException:
            self._staging.release(staged)
            raise

    def _copy_to_device(self, into: torch.Tensor, staged: torch.Tensor) -> Pending:
        assert self._staging is not None
        copied = copy_to_device(into, staged)
        self._staging.release(staged, copied)
        return copied

    def _store_and_release(self, staged: torch.Tensor, start: int) -> Pending:
        assert self._staging is not None
        written = self.store(staged, start)
        self._staging.release(staged, written)
        return written


def _describe_content(names: WeakMethod[Callable[[int, int], Iterable[str]]], size: int, first: int, last: int) -> str:
    """Name the contents of bytes `[first, last)`.

    The extent refers to this function until the tier is closed. A strong reference to `names` would keep the model
    alive, which closes the tier.
    """
    found = names()
    return "" if found is None else abbreviate_names(found(first // size, -(-last // size)))
