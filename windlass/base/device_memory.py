"""Device and host memory: an emulated device memory on CPU machines, and copies between device and host.

[Note: emulated device] On a CPU machine the device's memory is the host's, so offloading moves nothing.
`WINDLASS_EMULATE_DEVICE=BYTES` emulates a separate device memory: allocations of windlass on the device count against
that budget, and copies in both directions are counted. With `WINDLASS_EMULATE_LATE=1` a copy runs only when it is
awaited, and its target holds NaN until then. So code that reads the target or overwrites the source too early gets a
wrong result.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from windlass.base import trace_ranges
from windlass.base.byte_counts import parse_bytes
from windlass.base.errors import DeviceMemoryError
from windlass.base.pending import DONE, FinishingPending, Pending


@dataclass
class CopyCounters:
    """Bytes that were copied since the last reset."""

    to_device: int = 0
    to_host: int = 0

    def reset(self) -> None:
        """Reset both counters to zero."""
        self.to_device = self.to_host = 0


class EmulatedDeviceMemory:
    """Memory of the emulated device, with a hard budget.

    Args:
        budget: size of the memory in bytes.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self.used, self.peak = budget, 0, 0

    def update(self, holder: str, bytes_before: int, bytes_after: int) -> None:
        """Change the bytes of a holder, such as a buffer or slot, from `bytes_before` to `bytes_after`.

        Raises:
            DeviceMemoryError: the change exceeds the budget. Nothing was changed.
        """
        used = self.used - bytes_before + bytes_after
        if bytes_after > bytes_before and used > self.budget:
            raise DeviceMemoryError(
                f"the emulated device is full: {holder} takes {bytes_after - bytes_before:,} bytes more, "
                f"{self.used:,} of {self.budget:,} are in use; offload more, or raise WINDLASS_EMULATE_DEVICE"
            )
        self.used = used
        self.peak = max(self.peak, used)


class DeviceMemoryLedger:
    """Emulated device memory of one model, by holder (a buffer or slot). torch counts the memory of a real device."""

    def __init__(self) -> None:
        self._bytes_of_holder: dict[Hashable, int] = {}

    def set_held_bytes(self, holder: Hashable, nbytes: int) -> None:
        """Set the number of device bytes of `holder`.

        Raises:
            DeviceMemoryError: the emulated device has too little memory. Nothing was changed.
        """
        if trace_ranges.recorder is not None:
            trace_ranges.recorder.set_held_bytes(str(holder), nbytes)
        place = emulated_device_memory()
        if place is None:
            return
        before = self._bytes_of_holder.get(holder, 0)
        if before != nbytes:
            place.update(str(holder), before, nbytes)
            self._bytes_of_holder[holder] = nbytes

    def release_all(self) -> None:
        """Set the bytes of all holders to 0."""
        for holder in list(self._bytes_of_holder):
            self.set_held_bytes(holder, 0)


copy_counters = CopyCounters()
_emulated_memory: EmulatedDeviceMemory | None = None
_emulated_memory_source = ""


def emulated_device_memory() -> EmulatedDeviceMemory | None:
    """Return the emulated device's memory, or None if the environment does not enable it.

    Raises:
        ConfigError: `WINDLASS_EMULATE_DEVICE` is not a number of bytes.
    """
    global _emulated_memory, _emulated_memory_source
    requested = os.environ.get("WINDLASS_EMULATE_DEVICE", "").strip()
    if requested != _emulated_memory_source:
        _emulated_memory, _emulated_memory_source = (
            (EmulatedDeviceMemory(parse_bytes(requested, "WINDLASS_EMULATE_DEVICE")) if requested else None),
            requested,
        )
    return _emulated_memory


def device_has_own_memory(device: torch.device) -> bool:
    """Return True if `device` has memory of its own, so that host memory is a separate tier."""
    return device.type == "cuda" or emulated_device_memory() is not None


def empty_host_tensor(numel: int, dtype: torch.dtype, *, pin: bool) -> torch.Tensor:
    """Return an empty tensor `[numel]` in host memory, page-locked if `pin` is set and a GPU is available."""
    return torch.empty(numel, dtype=dtype, pin_memory=pin and torch.cuda.is_available())


def copy_to_device(target: torch.Tensor, source: torch.Tensor) -> Pending:
    """Start `target.copy_(source)` from host to device. Do not use either tensor before the copy has finished."""
    copy_counters.to_device += target.numel() * target.element_size()
    return _start_copy(target, source)


def copy_to_host(target: torch.Tensor, source: torch.Tensor) -> Pending:
    """Start `target.copy_(source)` from device to host. Do not use either tensor before the copy has finished."""
    copy_counters.to_host += source.numel() * source.element_size()
    return _start_copy(target, source)


def _start_copy(target: torch.Tensor, source: torch.Tensor) -> Pending:
    if target.device.type == "cuda" or source.device.type == "cuda":
        return _copy_on_stream(target, source)
    if os.environ.get("WINDLASS_EMULATE_LATE") == "1":
        if target.is_floating_point():
            target.fill_(float("nan"))
        return FinishingPending(None, _no_op, lambda: _copy_now(target, source))
    _copy_now(target, source)
    return DONE


def _copy_now(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _no_op() -> None:
    return


_copy_streams: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}


def _copy_on_stream(target: torch.Tensor, source: torch.Tensor) -> Pending:
    """Start a copy on a separate stream, after the work queued so far.

    For a copy to the host, `wait` blocks the caller; otherwise it makes the current stream wait for the copy.
    """
    to_host = target.device.type == "cpu"
    device = source.device if to_host else target.device
    stream = _copy_streams.setdefault((device, to_host), torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record(stream)
    # keep both tensors alive until the wait, since another stream uses their memory
    keep: list[torch.Tensor] = [target, source]

    def block() -> None:
        if to_host:
            done.synchronize()
        else:
            torch.cuda.current_stream(device).wait_event(done)

    return FinishingPending(done.query if to_host else None, block, keep.clear)
