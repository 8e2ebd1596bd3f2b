"""One flat shard of a unit, and where it rests: in device memory, in host memory, or on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from weakref import WeakMethod

import torch

from windlass.base.device_memory import copy_to_device, copy_to_host, device_has_own_memory, empty_host_tensor
from windlass.base.pending import DONE, AllPending, ChainedPending, Pending
from windlass.storage.disk_error_messages import abbreviate_names
from windlass.storage.disk_tier import DiskTier
from windlass.storage.extent_transfer import Extent
from windlass.storage.staging_pool import StagingPool


class Tier(Enum):
    """Where a slot rests."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class Slot:
    """A flat shard `[numel]` with a home.

    Args:
        name: what it is, for messages (`parameters of layers.3`).
        numel, dtype: of the shard.
        home: where it rests. Host memory that is the device's own memory counts as host and costs no copy.
        device: where it is computed with.
        tier: the disk, for NVME.
        staging: lends host memory between it and a device that has its own.
        pin: page-lock host memory.

    Attributes:
        tensor: `[numel]` where it rests, or None on disk.
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
        tier = tier if numel else Tier.DEVICE  # nothing takes no room anywhere
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
        """Bytes of the shard."""
        return self.numel * self.dtype.itemsize

    def prefetch(self) -> bool:
        """Start to bring all of it from disk into host memory, for the next `fetch`; False if there is no room."""
        if self.tensor is None and self._prefetched is None:
            assert self._staging is not None
            if not self._staging.has_room(self.nbytes):
                return False
            if not self._is_fully_kept():
                self._prefetched = self._start_read(0, self.numel)
        return True

    def keep_staged(self, staged: torch.Tensor, start: int, written: Pending) -> None:
        """Have `staged`, of the staging memory, serve the next `fetch` of all that is here in place of a reading.

        Args:
            staged: the values of elements `[start, start + staged.numel())`, which `store` is writing.
            written: when it has.
        """
        assert self._staging is not None
        self._kept_staged.append((start, staged, written))
        self._staging.track(written)

    def set_content_description(self, names: Callable[[int, int], Iterable[str]]) -> None:
        """Have messages about damage on disk name what `names(start, stop)`, a method, gives for elements `[start,
        stop)`."""
        if self.tensor is None:
            self._extent.describe_content = partial(_describe_content, WeakMethod(names), self.dtype.itemsize)

    def discard(self) -> None:
        """Forget what is on disk, damaged or not: `read` gives zeros until it is written anew."""
        if self.tensor is None:
            assert self._disk is not None
            self.drop_staged()
            self._disk.discard(self._extent)
            self._discarded = True

    def drop_staged(self) -> None:
        """What was read ahead or kept is not what is on disk: drop it."""
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
        """Its place on disk, where it rests there."""
        return self._extent if self.tensor is None else None

    def fetch(self, into: torch.Tensor, start: int = 0) -> Pending:
        """Start to copy elements `[start, start + into.numel())` to `into`, which is on the device."""
        if self.tensor is not None:
            source = self.tensor.narrow(0, start, into.numel())
            if self.tier is Tier.HOST and device_has_own_memory(self._device):
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
        """As `fetch`, into host memory."""
        if self.tensor is not None:
            into.copy_(self.tensor.narrow(0, start, into.numel()))
            return DONE
        assert self._disk is not None
        return self._disk.read(self._extent, start * self.dtype.itemsize, into)

    def store(self, source: torch.Tensor, start: int = 0) -> Pending:
        """As `put`, from host memory; `source` may not change before it is finished."""
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
        """All of it in memory: where it rests, or a copy of what is on disk."""
        if self.tensor is not None:
            return self.tensor
        into = empty_host_tensor(self.numel, self.dtype, pin=False)
        if self._discarded:
            return into.zero_()
        self.load(into).wait()
        return into

    def read_unguarded(self, into: torch.Tensor) -> None:
        """Read all of it from disk into host memory, from any thread and for nobody who trains: what goes wrong is
        raised here alone."""
        assert self._disk is not None
        self._disk.read_unguarded(self._extent, 0, into)

    def write(self, values: torch.Tensor) -> None:
        """Put back what `read` gave, changed."""
        if self.tensor is None or self.tensor.data_ptr() != values.data_ptr():
            self.store(values).wait()

    def _is_fully_kept(self) -> bool:
        """Whether what was kept is all of it: pieces never overlap."""
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
        """Elements `[start, start + numel)` on their way from disk: what was read ahead, if it is all of them."""
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
    """Weakly, as the tier holds this to its end: it would keep the model alive that is to close it."""
    found = names()
    return "" if found is None else abbreviate_names(found(first // size, -(-last // size)))
