"""Stores for saved activations, in device memory or in host memory."""

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
"""Device memory, host memory or files."""


class StoredActivation(Pending, Protocol):
    """Tensor in a store. `poll` and `wait` refer to its transfer to the store."""

    @property
    def is_source_free(self) -> bool:
        """True if the transfer no longer reads the source tensor."""
        ...

    def fetch(self) -> PendingCopy:
        """Start to copy the tensor `[n]` back to its original device. No copy is needed if it is already there."""
        ...


class ActivationStore(Protocol):
    """Store for flat tensors.

    Attributes:
        tier: the tier of the store.
        is_collective: True if a fetch communicates with other ranks. Such a fetch runs at each request and is never
            prefetched.
        max_in_flight: maximum number of tensors whose transfer to the store is not complete.
    """

    tier: ActivationTier
    is_collective: bool
    max_in_flight: int

    def begin_call(self, unique_bytes: int, shared_bytes: int) -> None:
        """Announce that a checkpointed call is about to store inputs.

        Args:
            unique_bytes: bytes that only this call stores.
            shared_bytes: bytes that other calls store too.
        """
        ...

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Return True if the store takes `tensor`. A host store refuses tensors that are in host memory already."""
        ...

    def put(self, flat: torch.Tensor) -> StoredActivation:
        """Start to store a contiguous tensor `[n]`."""
        ...


class DeviceStore:
    """Store in device memory. With `num_checkpoints`, it has one buffer per device, with room for the inputs of
    that many checkpointed calls.
    """

    tier: ActivationTier = "device"
    is_collective = False
    max_in_flight = 1

    def __init__(self, num_checkpoints: int | None = None) -> None:
        self._num_checkpoints = num_checkpoints
        self._buffers: dict[torch.device, ActivationBuffer] = {}
        self._announced_bytes = (0, 0)
        # devices whose buffer received begin_call for the current call
        self._announced_devices: set[torch.device] = set()

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
    """Store in host memory, pinned if CUDA is available; in one buffer if `num_checkpoints` is set."""

    tier: ActivationTier = "cpu"
    is_collective = False
    max_in_flight = 2  # the source of each copy in flight still occupies device memory

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
    """Copy on the device. Deleting this object frees `region`."""

    is_source_free = True

    def __init__(self, region: BufferRegion | None, value: torch.Tensor) -> None:
        self._region, self._value = region, value

    def poll(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def fetch(self) -> PendingCopy:
        """Return the value, or its clone if the value is in a buffer: the region may be reused while the caller still
        holds the result.
        """
        return CompletedCopy(self._value if self._region is None else self._value.clone())


class _HostActivation:
    """Copy in host memory, possibly still in flight. Deleting this object frees `region`."""

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
