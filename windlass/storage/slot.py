"""One flat shard of a unit, and where it rests: in device memory, in host memory, or on disk."""

from __future__ import annotations

from enum import Enum

import torch

from windlass.base.memory import Then, copy_to_device, copy_to_host, host_empty, separate
from windlass.base.pending import DONE, Pending
from windlass.storage.tier import DiskTier


class Home(Enum):
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
        pin: page-lock host memory.

    Attributes:
        tensor: `[numel]` where it rests, or None on disk.
    """

    def __init__(
        self,
        name: str,
        numel: int,
        dtype: torch.dtype,
        home: Home,
        device: torch.device,
        *,
        tier: DiskTier | None = None,
        pin: bool = True,
    ) -> None:
        home = home if numel else Home.DEVICE  # nothing takes no room anywhere
        self.name, self.numel, self.dtype, self.home, self._device = name, numel, dtype, home, device
        self._pin, self._tier = pin, tier
        self.tensor: torch.Tensor | None = None
        if home is Home.NVME:
            assert tier is not None
            self._extent = tier.allocate(self.nbytes, name)
        elif home is Home.HOST:
            self.tensor = host_empty(numel, dtype, pin=pin)
        else:
            self.tensor = torch.empty(numel, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return self.numel * self.dtype.itemsize

    def fetch(self, into: torch.Tensor, start: int = 0) -> Pending:
        """Start to copy elements `[start, start + into.numel())` to `into`, which is on the device."""
        if self.tensor is not None:
            source = self.tensor.narrow(0, start, into.numel())
            if self.home is Home.HOST and separate(self._device):
                return copy_to_device(into, source)
            if into.data_ptr() != source.data_ptr():
                into.copy_(source)
            return DONE
        if not separate(self._device):
            return self.load(into, start)
        staged = self._staging(into.numel())
        return Then(self.load(staged, start), lambda: copy_to_device(into, staged))

    def put(self, source: torch.Tensor, start: int = 0) -> Pending:
        """Start to copy `source`, which is on the device, to elements `[start, start + source.numel())`."""
        if self.tensor is not None:
            target = self.tensor.narrow(0, start, source.numel())
            if self.home is Home.HOST and separate(self._device):
                return copy_to_host(target, source)
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
            return DONE
        if not separate(self._device):
            return self.store(source, start)
        staged = self._staging(source.numel())
        return Then(copy_to_host(staged, source), lambda: self.store(staged, start))

    def load(self, into: torch.Tensor, start: int = 0) -> Pending:
        """As `fetch`, into host memory."""
        if self.tensor is not None:
            into.copy_(self.tensor.narrow(0, start, into.numel()))
            return DONE
        assert self._tier is not None
        return self._tier.read(self._extent, start * self.dtype.itemsize, into)

    def store(self, source: torch.Tensor, start: int = 0) -> Pending:
        """As `put`, from host memory; `source` may not change before it is finished."""
        if self.tensor is not None:
            self.tensor.narrow(0, start, source.numel()).copy_(source)
            return DONE
        assert self._tier is not None
        return self._tier.write(self._extent, start * self.dtype.itemsize, source)

    def read(self) -> torch.Tensor:
        """All of it in memory: where it rests, or a copy of what is on disk."""
        if self.tensor is not None:
            return self.tensor
        into = host_empty(self.numel, self.dtype, pin=False)
        self.load(into).wait()
        return into

    def write(self, whole: torch.Tensor) -> None:
        """Put back what `read` gave, changed."""
        if self.tensor is None or self.tensor.data_ptr() != whole.data_ptr():
            self.store(whole).wait()

    def _staging(self, numel: int) -> torch.Tensor:
        assert self._tier is not None
        return self._tier.buffer(numel * self.dtype.itemsize)[: numel * self.dtype.itemsize].view(self.dtype)
