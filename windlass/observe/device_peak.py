"""Peak arithmetic rate of a device: from a table of known GPUs, or measured."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import cache

import torch

from windlass.base.compute_device import synchronized_time

# Dense TFLOP/s of the makers' data sheets: 16-bit tensor cores, TF32 tensor cores, fp32. The entry of the first
# name that a device's name contains as whole words is used.
_KNOWN_GPUS: dict[str, tuple[float, float, float]] = {
    "GB200": (2500.0, 1250.0, 80.0),
    "B200": (2250.0, 1125.0, 75.0),
    "H100 PCIe": (756.0, 378.0, 51.0),
    "H200": (989.4, 494.7, 67.0),
    "H100": (989.4, 494.7, 67.0),
    "GH200": (989.4, 494.7, 67.0),
    "A100": (312.0, 156.0, 19.5),
    "L40S": (362.0, 183.0, 91.6),
    "L4": (121.0, 60.0, 30.3),
    "V100": (125.0, 15.7, 15.7),
    "T4": (65.0, 8.1, 8.1),
}
_MEASURED_WIDTH = 1024
_MEASURED_S = 0.1


@dataclass(frozen=True)
class DevicePeak:
    """Rate in FLOP/s, and its source: `table`, `measured` or `configuration`."""

    flops: float
    source: str


@cache
def device_peak(device: torch.device, dtype: torch.dtype) -> DevicePeak:
    """Return the peak of matrix products in `dtype`. A device that the table lacks is measured for 0.1 s.

    A measured peak is that of torch's own product on the threads of this process, which other programs may slow down.
    """
    if device.type == "cuda":
        known = known_peak(torch.cuda.get_device_name(device), dtype, tf32=torch.backends.cuda.matmul.allow_tf32)
        if known is not None:
            return DevicePeak(known, "table")
    return DevicePeak(_measure(device, dtype), "measured")


def names_gpu(name: str, model: str) -> bool:
    """Return True if the name of a GPU contains `model` as whole words: "NVIDIA L40" does not contain "L4"."""
    return re.search(rf"\b{re.escape(model)}\b", name, re.IGNORECASE) is not None


def known_peak(name: str, dtype: torch.dtype, *, tf32: bool) -> float | None:
    """Return the FLOP/s of dense matrix products in `dtype` by the name of a GPU.

    Return None if the table lacks the GPU, or `dtype` is float64.

    Args:
        tf32: products of types with more than 16 bits use TF32 tensor cores.
    """
    rates = next((found for key, found in _KNOWN_GPUS.items() if names_gpu(name, key)), None)
    if rates is None or dtype.itemsize > 4:
        return None
    return 1e12 * (rates[0] if dtype.itemsize <= 2 else rates[1] if tf32 else rates[2])


def _measure(device: torch.device, dtype: torch.dtype) -> float:
    # Ones, because random values would change the state of the random generator.
    matrix = torch.ones(_MEASURED_WIDTH, _MEASURED_WIDTH, dtype=dtype, device=device)
    with torch.no_grad():
        torch.mm(matrix, matrix)
        best, end = float("inf"), time.perf_counter() + _MEASURED_S
        while time.perf_counter() < end or best == float("inf"):
            start = synchronized_time(device)
            torch.mm(matrix, matrix)
            best = min(best, synchronized_time(device) - start)
    return 2 * _MEASURED_WIDTH**3 / best
