"""Asynchronous copies between device memory and host memory."""

from __future__ import annotations

from typing import Protocol

import torch

from windlass.base.device_memory import copy_to_device, copy_to_host, device_has_own_memory
from windlass.base.pending import Pending


class PendingCopy(Pending, Protocol):
    """Copy in flight. `value` is the copied tensor after `wait` returned."""

    @property
    def value(self) -> torch.Tensor: ...


class CompletedCopy:
    """Placeholder for a copy that is complete already, e.g. because device and host share one memory."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def poll(self) -> bool:
        return True

    def wait(self) -> None:
        return


class SideStreamCopy:
    """Copy on a side stream, between pinned host memory and a CUDA device.

    Work submitted to the current stream after `wait` runs after the copy. For a copy to the host, `wait` also blocks
    until the copy is complete. If this object is deleted before `wait`, the current stream waits for the copy, so
    source and destination may be freed right afterwards.
    """

    def __init__(self, source: torch.Tensor, value: torch.Tensor, device: torch.device) -> None:
        self.value = value
        self._source: torch.Tensor | None = source  # keeps the source's memory alive during the copy
        self._device, self._done = device, torch.cuda.Event()
        side = _side_stream(device, to_host=source.device == device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            value.copy_(source, non_blocking=True)
            self._done.record(side)

    def poll(self) -> bool:
        if self._source is not None and self._done.query():
            self.wait()
        return self._source is None

    def wait(self) -> None:
        if self._source is None:
            return
        torch.cuda.current_stream(self._device).wait_event(self._done)
        if self.value.device != self._device:
            self._done.synchronize()  # the host itself reads the value next
        self._source = None

    def __del__(self) -> None:
        if self._source is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)


_streams: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}


def _side_stream(device: torch.device, *, to_host: bool) -> torch.cuda.Stream:
    if (device, to_host) not in _streams:
        _streams[device, to_host] = torch.cuda.Stream(device)
    return _streams[device, to_host]


class EmulatedCopy:
    """Copy to or from an emulated device."""

    def __init__(self, value: torch.Tensor, pending: Pending) -> None:
        self.value, self._pending = value, pending

    def poll(self) -> bool:
        return self._pending.poll()

    def wait(self) -> None:
        self._pending.wait()


def has_separate_memory(device: torch.device) -> bool:
    """Return True if `device` has memory separate from host memory."""
    return device_has_own_memory(device)


def start_copy_to_host(tensor: torch.Tensor, out: torch.Tensor | None = None) -> PendingCopy:
    """Start to copy a contiguous tensor to host memory: to `out`, or to new memory, which is pinned for CUDA devices.

    If device and host share one memory and `out` is None, nothing is copied.
    """
    if not has_separate_memory(tensor.device):
        return CompletedCopy(tensor if out is None else out.copy_(tensor))
    if tensor.device.type != "cuda":
        value = torch.empty_like(tensor) if out is None else out
        return EmulatedCopy(value, copy_to_host(value, tensor))
    if out is None:
        out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return SideStreamCopy(tensor, out, tensor.device)


def start_copy_to_device(tensor: torch.Tensor, device: torch.device) -> PendingCopy:
    """Start to copy a contiguous tensor from host memory to `device`. Nothing is copied if both share one memory."""
    if not has_separate_memory(device):
        return CompletedCopy(tensor)
    if device.type != "cuda":
        value = torch.empty_like(tensor)
        return EmulatedCopy(value, copy_to_device(value, tensor))
    return SideStreamCopy(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device=device), device)
