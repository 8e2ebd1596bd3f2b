"""Memory usage of this process: resident, proportional and peak on the host, and on the device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from windlass.base.log import logger

_PROC = Path("/proc/self")
_GIB = 1 << 30


@dataclass(frozen=True)
class DeviceMemory:
    """Memory in torch's allocator on a device, in bytes."""

    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int


def resident_bytes() -> int | None:
    """Return the resident bytes of this process, with shared pages counted in full; None without Linux's /proc."""
    return _read_proc_field("status", "VmRSS")


def peak_resident_bytes() -> int | None:
    """Return the peak of `resident_bytes` so far; None without Linux's /proc."""
    return _read_proc_field("status", "VmHWM")


def proportional_bytes() -> int | None:
    """Return the proportional bytes of this process, so that the sum over ranks is the host's memory use.

    A page shared by n processes counts 1/n in each. The kernel walks all pages for this figure (milliseconds per GiB).
    None if /proc/self/smaps_rollup is missing or forbidden.
    """
    return _read_proc_field("smaps_rollup", "Pss")


def device_memory(device: torch.device | str | None = None) -> DeviceMemory | None:
    """Return the memory in use on a CUDA device (by default the current one); None on a CPU."""
    if not torch.cuda.is_available() or (device is not None and torch.device(device).type != "cuda"):
        return None
    return DeviceMemory(
        torch.cuda.memory_allocated(device),
        torch.cuda.max_memory_allocated(device),
        torch.cuda.memory_reserved(device),
        torch.cuda.max_memory_reserved(device),
    )


def see_memory_usage(message: str, device: torch.device | str | None = None) -> str:
    """Return one line with `message` and the host and device memory of this rank in GiB. Rank 0 logs the line."""
    host = {"resident": resident_bytes(), "peak": peak_resident_bytes(), "proportional": proportional_bytes()}
    parts = [f"{name} {_format_gib(size)}" for name, size in host.items() if size is not None]
    line = f"{message}: host {', '.join(parts) if parts else 'unknown (no /proc here)'}"
    on_device = device_memory(device)
    if on_device is not None:
        line += (
            f"; device allocated {_format_gib(on_device.allocated)} (peak {_format_gib(on_device.peak_allocated)}), "
            f"reserved {_format_gib(on_device.reserved)} (peak {_format_gib(on_device.peak_reserved)})"
        )
    logger.info(line)
    return line


def _format_gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


def _read_proc_field(file: str, name: str) -> int | None:
    try:
        text = (_PROC / file).read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
