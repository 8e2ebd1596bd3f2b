"""Activations in files: written while the forward goes on, read back ahead of their backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from windlass.base.pending import Pending
from windlass.parallel.copies import Copy, separate_memories, to_device, to_host
from windlass.parallel.places import Home, Stay

_SPARE_BUFFERS = 2  # of each size: as many as are filled while others are written
_SPARE_IN_ALL = 16  # batches of ever other lengths would leave two of each


class Tier(Protocol):
    """What is needed of `windlass.storage.DiskTier`."""

    def allocate(self, nbytes: int, what: str) -> Any: ...
    def free(self, extent: Any) -> None: ...
    def write(self, extent: Any, offset: int, source: torch.Tensor) -> Pending: ...
    def read(self, extent: Any, offset: int, into: torch.Tensor) -> Pending: ...
    def buffer(self, nbytes: int) -> torch.Tensor: ...


class DiskPlace:
    """Files of a disk tier. Space and buffers are used again: as a rule every step keeps tensors of the same sizes.

    Where sizes change, spare space that is more than was ever in use at a time goes back before more is taken.
    """

    home: Home = "nvme"
    collective = False
    under_way = 4

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self._extents: defaultdict[int, list[Any]] = defaultdict(list)
        self._used = self._most = self._spare = 0  # bytes of extents: in use, in use at most, not in use
        self._buffers: list[torch.Tensor] = []  # the oldest first

    def expect(self, own: int, shared: int) -> None:
        return

    def takes(self, tensor: torch.Tensor) -> bool:
        return True

    def put(self, flat: torch.Tensor) -> Stay:
        return _OnDisk(self, flat)

    def take_extent(self, nbytes: int) -> Any:
        """Space on disk that nobody reads any more.

        Raises:
            StorageError: the disk is full.
        """
        spare = self._extents[nbytes]
        if not spare and self._spare and self._spare >= self._most:
            for extent in [extent for extents in self._extents.values() for extent in extents]:
                self.tier.free(extent)
            self._extents.clear()
            self._spare = 0
        if spare:
            extent = spare.pop()
            self._spare -= nbytes
        else:
            extent = self.tier.allocate(nbytes, "kept activations")
        self._used += nbytes
        self._most = max(self._most, self._used)
        return extent

    def give_extent(self, nbytes: int, extent: Any) -> None:
        """What lies there is no longer needed."""
        self._extents[nbytes].append(extent)
        self._used -= nbytes
        self._spare += nbytes

    def take_buffer(self, nbytes: int) -> torch.Tensor:
        """`[nbytes]` uint8 to write from."""
        for index, spare in enumerate(self._buffers):
            if spare.numel() == nbytes:
                return self._buffers.pop(index)
        return self.tier.buffer(nbytes)

    def give_buffer(self, buffer: torch.Tensor) -> None:
        """Nobody sees that memory any more."""
        if sum(spare.numel() == buffer.numel() for spare in self._buffers) < _SPARE_BUFFERS:
            self._buffers.append(buffer)
            del self._buffers[:-_SPARE_IN_ALL]


class _OnDisk:
    """First a copy to host memory, then a write from there; its space goes back with this object."""

    def __init__(self, place: DiskPlace, flat: torch.Tensor) -> None:
        self._place, self._dtype, self._device, self._nbytes = place, flat.dtype, flat.device, flat.nbytes
        self._extent = place.take_extent(flat.nbytes)
        self._buffer = None if separate_memories(flat.device) else place.take_buffer(flat.nbytes)
        self._copy: Copy | None = to_host(flat, None if self._buffer is None else self._buffer.view(flat.dtype))
        self._write: Pending | None = None
        self._start_write()

    def __del__(self) -> None:
        if hasattr(self, "_extent"):  # there is none where the disk was full
            self._place.give_extent(self._nbytes, self._extent)

    @property
    def left(self) -> bool:
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

    def fetch(self) -> Copy:
        if self._copy is not None:  # still in memory
            self._copy.wait()
            self._buffer = None  # it is seen from outside now, so it cannot be used again
            return to_device(self._copy.value, self._device)
        if separate_memories(self._device):
            into = torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        else:
            into = self._place.tier.buffer(self._nbytes)
        return _Read(self._place.tier.read(self._extent, 0, into), into.view(self._dtype), self._device)

    def _start_write(self) -> None:
        if self._write is None and self._copy is not None and self._copy.poll():
            self._write = self._place.tier.write(self._extent, 0, self._copy.value.view(torch.uint8))

    def _finish(self) -> None:
        if self._buffer is not None:
            self._place.give_buffer(self._buffer)
        self._copy = self._buffer = None


class _Read:
    """A read into host memory, then a copy to the device."""

    def __init__(self, read: Pending, into: torch.Tensor, device: torch.device) -> None:
        self._read, self._into, self._device = read, into, device
        self._copy: Copy | None = None

    @property
    def value(self) -> torch.Tensor:
        assert self._copy is not None, "wait comes first"
        return self._copy.value

    def poll(self) -> bool:
        if self._copy is None and self._read.poll():
            self._copy = to_device(self._into, self._device)
        return self._copy is not None and self._copy.poll()

    def wait(self) -> None:
        if self._copy is None:
            self._read.wait()
            self._copy = to_device(self._into, self._device)
        self._copy.wait()


def open_disk(paths: Sequence[str]) -> DiskPlace:
    """A place in folders, over which blocks go round. Its files go with the last activation that lies there.

    Raises:
        StorageError: a path is no folder, may not be written to, or is full.
    """
    from windlass.storage import DiskTier  # only who asks for disks needs it

    return DiskPlace(DiskTier(list(paths), label="activations"))
