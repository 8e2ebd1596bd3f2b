"""Where activations wait for their backward: in a buffer on the device, in host memory."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from windlass.base.pending import Pending
from windlass.parallel.activation_buffer import ActivationBuffer, BufferRegion
from windlass.parallel.device_copies import (
    CompletedCopy,
    PendingCopy,
    has_separate_memory,
    start_copy_to_device,
    start_copy_to_host,
)

ActivationTier = Literal["device", "cpu", "nvme"]
"""Memory of the device, memory of the host, files; in the words of the configuration."""


class StoredActivation(Pending, Protocol):
    """A tensor that was put somewhere; finished (`poll`, `wait`) once nothing of the way there is under way."""

    @property
    def is_source_free(self) -> bool:
        """Whether the source is no longer read."""
        ...

    def fetch(self) -> PendingCopy:
        """Bring the tensor `[n]` back to the device it came from; again at each call."""
        ...


class ActivationStore(Protocol):
    """Takes flat tensors and gives them back.

    Attributes:
        home: the memory that it is.
        collective: a fetch needs the other ranks, so it happens each time it is asked for, and never earlier.
        under_way: how many tensors may be on their way here at a time.
    """

    tier: ActivationTier
    is_collective: bool
    max_in_flight: int

    def begin_call(self, unique_bytes: int, shared_bytes: int) -> None:
        """A checkpointed call is about to put `own` bytes here, and `shared` ones that other calls put too."""
        ...

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Whether putting `tensor` here makes room where it is."""
        ...

    def put(self, flat: torch.Tensor) -> StoredActivation:
        """Begin to take a contiguous tensor `[n]`."""
        ...


class DeviceStore:
    """The device itself; one buffer for `checkpoints` checkpointed calls if that is given."""

    tier: ActivationTier = "device"
    is_collective = False
    max_in_flight = 1

    def __init__(self, num_checkpoints: int | None = None) -> None:
        self._num_checkpoints = num_checkpoints
        self._buffers: dict[torch.device, ActivationBuffer] = {}
        self._announced_bytes = (0, 0)
        self._announced_devices: set[torch.device] = set()  # whose buffers know of the call that runs

    def begin_call(self, unique_bytes: int, shared_bytes: int) -> None:
        self._announced_bytes = unique_bytes, shared_bytes
        self._announced_devices.clear()

    def accepts(self, tensor: torch.Tensor) -> bool:
        return True

    def put(self, flat: torch.Tensor) -> StoredActivation:
        if self._num_checkpoints is None:
            return _DeviceActivation(None, flat.clone())
        buffer = self._buffers.setdefault(flat.device, ActivationBuffer(flat.device, self._num_checkpoints))
        if flat.device not in self._announced_devices:
            self._announced_devices.add(flat.device)
            buffer.begin_call(*self._announced_bytes)
        region = buffer.allocate(flat.nbytes)
        if region is None:
            return _DeviceActivation(None, flat.clone())
        return _DeviceActivation(region, region.memory.view(flat.dtype).copy_(flat))


class HostStore:
    """Host memory, pinned where the device is a CUDA one; in one buffer if `checkpoints` is given."""

    tier: ActivationTier = "cpu"
    is_collective = False
    max_in_flight = 2  # their sources still take memory of the device

    def __init__(self, num_checkpoints: int | None = None) -> None:
        pinned = torch.cuda.is_available()
        self._buffer = (
            ActivationBuffer(torch.device("cpu"), num_checkpoints, pinned=pinned) if num_checkpoints else None
        )

    def begin_call(self, unique_bytes: int, shared_bytes: int) -> None:
        if self._buffer is not None:
            self._buffer.begin_call(unique_bytes, shared_bytes)

    def accepts(self, tensor: torch.Tensor) -> bool:
        return has_separate_memory(tensor.device)

    def put(self, flat: torch.Tensor) -> StoredActivation:
        region = None if self._buffer is None else self._buffer.allocate(flat.nbytes)
        into = None if region is None else region.memory.view(flat.dtype)
        return _HostActivation(region, start_copy_to_host(flat, into), flat.device)


class _DeviceActivation:
    """A copy on the device; `region` goes back to its buffer with this object."""

    is_source_free = True

    def __init__(self, region: BufferRegion | None, value: torch.Tensor) -> None:
        self._region, self._value = region, value

    def poll(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def fetch(self) -> PendingCopy:
        """A copy of its own where it lies in a buffer: who keeps it longer must not see what comes there next."""
        return CompletedCopy(self._value if self._region is None else self._value.clone())


class _HostActivation:
    """A copy in host memory, maybe still on its way; `region` goes back to its buffer with this object."""

    def __init__(self, region: BufferRegion | None, copy: PendingCopy, device: torch.device) -> None:
        self._region, self._copy, self._device = region, copy, device

    @property
    def is_source_free(self) -> bool:
        return self._copy.poll()

    def poll(self) -> bool:
        return self._copy.poll()

    def wait(self) -> None:
        self._copy.wait()

    def fetch(self) -> PendingCopy:
        self._copy.wait()
        return start_copy_to_device(self._copy.value, self._device)
