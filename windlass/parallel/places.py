"""Where activations wait for their backward: in a buffer on the device, in host memory."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from windlass.base.pending import Pending
from windlass.parallel.buffer import Buffer, Region
from windlass.parallel.copies import Copy, Here, separate_memories, to_device, to_host

Home = Literal["device", "cpu", "nvme"]
"""Memory of the device, memory of the host, files; in the words of the configuration."""


class Stay(Pending, Protocol):
    """A tensor that was put somewhere; finished (`poll`, `wait`) once nothing of the way there is under way."""

    @property
    def left(self) -> bool:
        """Whether the source is no longer read."""
        ...

    def fetch(self) -> Copy:
        """Bring the tensor `[n]` back to the device it came from; again at each call."""
        ...


class Place(Protocol):
    """Takes flat tensors and gives them back.

    Attributes:
        home: the memory that it is.
        collective: a fetch needs the other ranks, so it happens each time it is asked for, and never earlier.
        under_way: how many tensors may be on their way here at a time.
    """

    home: Home
    collective: bool
    under_way: int

    def expect(self, own: int, shared: int) -> None:
        """A checkpointed call is about to put `own` bytes here, and `shared` ones that other calls put too."""
        ...

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether putting `tensor` here makes room where it is."""
        ...

    def put(self, flat: torch.Tensor) -> Stay:
        """Begin to take a contiguous tensor `[n]`."""
        ...


class DevicePlace:
    """The device itself; one buffer for `checkpoints` checkpointed calls if that is given."""

    home: Home = "device"
    collective = False
    under_way = 1

    def __init__(self, checkpoints: int | None = None) -> None:
        self._checkpoints = checkpoints
        self._buffers: dict[torch.device, Buffer] = {}
        self._expected = (0, 0)
        self._told: set[torch.device] = set()  # whose buffers know of the call that runs

    def expect(self, own: int, shared: int) -> None:
        self._expected = own, shared
        self._told.clear()

    def takes(self, tensor: torch.Tensor) -> bool:
        return True

    def put(self, flat: torch.Tensor) -> Stay:
        if self._checkpoints is None:
            return _OnDevice(None, flat.clone())
        buffer = self._buffers.setdefault(flat.device, Buffer(flat.device, self._checkpoints))
        if flat.device not in self._told:
            self._told.add(flat.device)
            buffer.expect(*self._expected)
        region = buffer.take(flat.nbytes)
        if region is None:
            return _OnDevice(None, flat.clone())
        return _OnDevice(region, region.memory.view(flat.dtype).copy_(flat))


class HostPlace:
    """Host memory, pinned where the device is a CUDA one; in one buffer if `checkpoints` is given."""

    home: Home = "cpu"
    collective = False
    under_way = 2  # their sources still take memory of the device

    def __init__(self, checkpoints: int | None = None) -> None:
        pinned = torch.cuda.is_available()
        self._buffer = Buffer(torch.device("cpu"), checkpoints, pinned=pinned) if checkpoints else None

    def expect(self, own: int, shared: int) -> None:
        if self._buffer is not None:
            self._buffer.expect(own, shared)

    def takes(self, tensor: torch.Tensor) -> bool:
        return separate_memories(tensor.device)

    def put(self, flat: torch.Tensor) -> Stay:
        region = None if self._buffer is None else self._buffer.take(flat.nbytes)
        into = None if region is None else region.memory.view(flat.dtype)
        return _OnHost(region, to_host(flat, into), flat.device)


class _OnDevice:
    """A copy on the device; `region` goes back to its buffer with this object."""

    left = True

    def __init__(self, region: Region | None, value: torch.Tensor) -> None:
        self._region, self._value = region, value

    def poll(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def fetch(self) -> Copy:
        """A copy of its own where it lies in a buffer: who keeps it longer must not see what comes there next."""
        return Here(self._value if self._region is None else self._value.clone())


class _OnHost:
    """A copy in host memory, maybe still on its way; `region` goes back to its buffer with this object."""

    def __init__(self, region: Region | None, copy: Copy, device: torch.device) -> None:
        self._region, self._copy, self._device = region, copy, device

    @property
    def left(self) -> bool:
        return self._copy.poll()

    def poll(self) -> bool:
        return self._copy.poll()

    def wait(self) -> None:
        self._copy.wait()

    def fetch(self) -> Copy:
        self._copy.wait()
        return to_device(self._copy.value, self._device)
