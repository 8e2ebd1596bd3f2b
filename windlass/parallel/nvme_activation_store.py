"""Store that writes activations to files during the forward and prefetches them for the backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from windlass.base.pending import Pending
from windlass.parallel.activation_store import ActivationTier, StoredActivation
from windlass.parallel.device_copies import PendingCopy, has_separate_memory, start_copy_to_device, start_copy_to_host

_SPARE_BUFFERS_PER_SIZE = 2  # spare buffers per size: two, so that one can be filled while the other is written
_MAX_SPARE_BUFFERS = 16  # limit over all sizes: batches of ever-changing lengths would leave two of each size


class ExtentStorage(Protocol):
    """Methods of `windlass.storage.DiskTier` that the store uses."""

    def allocate(self, nbytes: int, name: str) -> Any: ...
    def free(self, extent: Any) -> None: ...
    def write(self, extent: Any, offset: int, source: torch.Tensor) -> Pending: ...
    def read(self, extent: Any, offset: int, into: torch.Tensor) -> Pending: ...
    def allocate_buffer(self, nbytes: int) -> torch.Tensor: ...


class NvmeStore:
    """Store in the files of a disk tier. Extents and buffers are reused, since every step usually saves tensors of the
    same sizes.

    If sizes change, all unused extents are freed before a new allocation once their total size reaches the peak number
    of bytes in use.
    """

    tier: ActivationTier = "nvme"
    is_collective = False
    max_in_flight = 4

    def __init__(self, storage: ExtentStorage) -> None:
        self.storage = storage
        self._extents: defaultdict[int, list[Any]] = defaultdict(list)
        self._used_bytes = self._peak_bytes = self._spare_bytes = 0  # bytes of extents: in use, peak in use, not in use
        self._buffers: list[torch.Tensor] = []  # spare buffers, oldest first

    def begin_call(self, unique_bytes: int, shared_bytes: int) -> None:
        return

    def accepts(self, tensor: torch.Tensor) -> bool:
        return True

    def put(self, flat: torch.Tensor) -> StoredActivation:
        return _DiskActivation(self, flat)

    def allocate_extent(self, nbytes: int) -> Any:
        """Return an extent that is not in use.

        Raises:
            StorageError: the disk is full.
        """
        spare = self._extents[nbytes]
        if not spare and self._spare_bytes and self._spare_bytes >= self._peak_bytes:
            for extent in [extent for extents in self._extents.values() for extent in extents]:
                self.storage.free(extent)
            self._extents.clear()
            self._spare_bytes = 0
        if spare:
            extent = spare.pop()
            self._spare_bytes -= nbytes
        else:
            extent = self.storage.allocate(nbytes, "saved activations")
        self._used_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        return extent

    def release_extent(self, nbytes: int, extent: Any) -> None:
        """Make an extent available for later tensors."""
        self._extents[nbytes].append(extent)
        self._used_bytes -= nbytes
        self._spare_bytes += nbytes

    def acquire_buffer(self, nbytes: int) -> torch.Tensor:
        """Return a `[nbytes]` uint8 buffer to write from."""
        for index, spare in enumerate(self._buffers):
            if spare.numel() == nbytes:
                return self._buffers.pop(index)
        return self.storage.allocate_buffer(nbytes)

    def release_buffer(self, buffer: torch.Tensor) -> None:
        """Return a buffer to the pool. No other object may refer to it."""
        if sum(spare.numel() == buffer.numel() for spare in self._buffers) < _SPARE_BUFFERS_PER_SIZE:
            self._buffers.append(buffer)
            del self._buffers[:-_MAX_SPARE_BUFFERS]


class _DiskActivation:
    """Tensor in a file: copied to host memory, then written from there. Deleting this object releases its extent."""

    def __init__(self, store: NvmeStore, flat: torch.Tensor) -> None:
        self._store, self._dtype, self._device, self._nbytes = store, flat.dtype, flat.device, flat.nbytes
        self._extent = store.allocate_extent(flat.nbytes)
        self._buffer = None if has_separate_memory(flat.device) else store.acquire_buffer(flat.nbytes)
        self._copy: PendingCopy | None = start_copy_to_host(
            flat, None if self._buffer is None else self._buffer.view(flat.dtype)
        )
        self._write: Pending | None = None
        self._start_write()

    def __del__(self) -> None:
        if hasattr(self, "_extent"):  # absent if the disk was full
            self._store.release_extent(self._nbytes, self._extent)

    @property
    def is_source_free(self) -> bool:
        self._start_write()
        return self._copy is None or self._copy.poll()

    def poll(self) -> bool:
        self._start_write()
        if self._write is not None and self._write.poll():
            self._finish()
        return self._copy is None

    def wait(self) -> None:
        if self._copy is None:
            return
        self._copy.wait()
        self._start_write()
        assert self._write is not None
        self._write.wait()
        self._finish()

    def fetch(self) -> PendingCopy:
        if self._copy is not None:  # still in memory
            self._copy.wait()
            self._buffer = None  # the caller now holds a view of the buffer, so the store must not reuse the buffer
            return start_copy_to_device(self._copy.value, self._device)
        if has_separate_memory(self._device):
            into = torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        else:
            into = self._store.storage.allocate_buffer(self._nbytes)
        return _DiskRead(self._store.storage.read(self._extent, 0, into), into.view(self._dtype), self._device)

    def _start_write(self) -> None:
        if self._write is None and self._copy is not None and self._copy.poll():
            self._write = self._store.storage.write(self._extent, 0, self._copy.value.view(torch.uint8))

    def _finish(self) -> None:
        if self._buffer is not None:
            self._store.release_buffer(self._buffer)
        self._copy = self._buffer = None


class _DiskRead:
    """Read into host memory, followed by a copy to the device."""

    def __init__(self, read: Pending, into: torch.Tensor, device: torch.device) -> None:
        self._read, self._into, self._device = read, into, device
        self._copy: PendingCopy | None = None

    @property
    def value(self) -> torch.Tensor:
        assert self._copy is not None, "call wait() first"
        return self._copy.value

    def poll(self) -> bool:
        if self._copy is None and self._read.poll():
            self._copy = start_copy_to_device(self._into, self._device)
        return self._copy is not None and self._copy.poll()

    def wait(self) -> None:
        if self._copy is None:
            self._read.wait()
            self._copy = start_copy_to_device(self._into, self._device)
        self._copy.wait()


def open_nvme_store(paths: Sequence[str]) -> NvmeStore:
    """Create a store whose blocks are striped over these folders. Its files are deleted with the last activation in
    them.

    Raises:
        StorageError: a path is not a folder, is not writable, or is full.
    """
    from windlass.storage import DiskTier  # imported here, because only stores on NVMe need it

    return NvmeStore(DiskTier(list(paths), label="activations"))
