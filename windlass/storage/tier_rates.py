"""Measured rates of the tiers: memory of device and host, the link between them, and the disk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from windlass.base.device_memory import device_has_own_memory
from windlass.storage.disk_tier import DiskTier

_SAMPLE = 16 << 20  # bytes of a measured copy, and of the measurement of a disk
_SECONDS = 0.05  # time limit of the repeated copies for one rate
_measured: dict[tuple[str, str], TierRates] = {}


@dataclass(frozen=True)
class TierRates:
    """Bytes per second of one rank, while all ranks of the host are measured at the same time.

    Attributes:
        device, host: Rate of mixed reads and writes of device and host memory, as in an optimizer update.
        to_device, to_host: Rate of copies from host to device and back; infinite if both are one memory.
        disk_read, disk_write: Rate of transfers of the NVMe tier; 0: there is none.
    """

    device: float
    host: float
    to_device: float = math.inf
    to_host: float = math.inf
    disk_read: float = 0.0
    disk_write: float = 0.0

    def slowest(self, other: TierRates) -> TierRates:
        """Return the lower of the two values of each rate."""
        return TierRates(**{one.name: min(getattr(self, one.name), getattr(other, one.name)) for one in fields(self)})


def measure_tier_rates(device: torch.device, disk: DiskTier | None) -> TierRates:
    """Measure the rates, once in a process for each device and disk. This takes a fraction of a second and transfers
    48 MiB to and from the disk.

    Raises:
        StorageError: the disk cannot be written or read.
    """
    key = str(device), disk.description() if disk is not None else ""
    if key not in _measured:
        _measured[key] = _measure(device, disk)
    return _measured[key]


def _measure(device: torch.device, disk: DiskTier | None) -> TierRates:
    on_host = torch.zeros(_SAMPLE // 4)
    host = 2 * _copy_rate(on_host, torch.zeros(_SAMPLE // 4), _no_wait)
    read = write = 0.0
    if disk is not None:
        found = disk.measure_rates(_SAMPLE)
        read, write = max(found.read_rate, 1.0), max(found.write_rate, 1.0)
    if not device_has_own_memory(device):
        return TierRates(host, host, disk_read=read, disk_write=write)
    if device.type != "cuda":  # an emulated device uses the memory and the copies of the host
        return TierRates(host, host, host / 2, host / 2, read, write)
    pinned, on_device = on_host.pin_memory(), on_host.to(device)

    def wait() -> None:
        torch.cuda.synchronize(device)

    return TierRates(
        device=2 * _copy_rate(on_device, torch.zeros_like(on_device), wait),
        host=host,
        to_device=_copy_rate(on_device, pinned, wait),
        to_host=_copy_rate(pinned, on_device, wait),
        disk_read=read,
        disk_write=write,
    )


def _copy_rate(target: torch.Tensor, source: torch.Tensor, wait: Callable[[], None]) -> float:
    """Return the best rate of repeated copies, in bytes copied per second."""
    best, deadline = math.inf, time.perf_counter() + _SECONDS
    while True:
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        wait()
        end = time.perf_counter()
        best = min(best, end - begin)
        if end > deadline:
            return _SAMPLE / max(best, 1e-9)


def _no_wait() -> None:
    return
