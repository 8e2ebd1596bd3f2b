"""Experiment of `windlass bench device`: measure the rates of matrix products, attention and memory, and write them
into the table `[device]` of a cluster file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from windlass.base.compute_device import local_device, synchronized_time
from windlass.base.dtypes import dtype_name, parse_dtype
from windlass.base.errors import ConfigError
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.cli.benches.measured_cluster import CLUSTER_FILE, set_measured

_COPIED = 256 << 20  # bytes: more than caches hold
_HEADS, _TOKENS, _FEATURES = 8, 1024, 64
_SECONDS = 0.3  # an operation is repeated for this time; the fastest call counts
_LAUNCHES = 100


@dataclass(frozen=True)
class DeviceRates:
    """Rates of one device.

    Attributes:
        flops: FLOP/s of a matrix product by dtype.
        attention_share: FLOP/s of attention divided by the FLOP/s of a matrix product, both in the first dtype of
            `flops`; at most 1.
        memory_rate: Bytes a second that a copy reads and writes, counted together.
        launch_seconds: Time of an addition to a one-element tensor; an estimate of the cost of a kernel launch.
        memory: Bytes of the device's memory.
    """

    flops: dict[str, float]
    attention_share: float
    memory_rate: float
    launch_seconds: float
    memory: int

    def cluster_values(self) -> dict[str, Any]:
        """Return the values of the table `[device]` of a cluster file. Its rates are measured ones, not peak rates, so
        the efficiencies of products and memory are 1."""
        return {
            "flops": {name: f"{rate / 1e9:.6g}GFLOP/s" for name, rate in self.flops.items()},
            "memory": f"{self.memory >> 20}MiB",
            "memory_rate": f"{self.memory_rate / 1e9:.6g}GB/s",
            "matmul_efficiency": 1.0,
            "memory_efficiency": 1.0,
            "attention_efficiency": round(self.attention_share, 3),
            "launch": f"{self.launch_seconds * 1e6:.3f}us",
        }


def parse_dtypes(text: str) -> list[torch.dtype]:
    """Return the dtypes of a comma-separated list, without duplicates.

    Raises:
        ConfigError: a dtype is unknown.
    """
    return list(dict.fromkeys(parse_dtype(word.strip()) for word in text.split(",")))


def run_device_bench(dtypes: Sequence[torch.dtype], size: int, out: Path) -> None:
    """Measure this process's device, print the rates, write `device.json`, and set `[device]` in `cluster.toml`."""
    device = local_device()
    rates = measure_device(device, dtypes, size)
    console = bench_console()
    table = Table(title=f"rates of {device}, products of {size} x {size}", title_justify="left")
    table.add_column("measurement")
    table.add_column("rate", justify="right")
    for name, rate in rates.flops.items():
        table.add_row(f"product, {name}", f"{rate / 1e9:,.1f} GFLOP/s")
    table.add_row("attention, share of a product", f"{rates.attention_share:.0%}")
    table.add_row("copy, reads and writes", f"{rates.memory_rate / 1e9:,.2f} GB/s")
    table.add_row("smallest operation", f"{rates.launch_seconds * 1e6:,.2f} us")
    console.print(table)
    written = write_result(out / "device.json", {"bench": "device", "device": str(device), "size": size, **vars(rates)})
    set_measured(out / CLUSTER_FILE, "device", rates.cluster_values())
    console.print(f"written: {written}, and \\[device] of {out / CLUSTER_FILE}, for windlass simulate", soft_wrap=True)


def measure_device(device: torch.device, dtypes: Sequence[torch.dtype], size: int) -> DeviceRates:
    """Measure the rates of one device. A CPU is measured with the number of threads of this process.

    Args:
        size: Number of rows, and of columns, of both factors of a matrix product.

    Raises:
        ConfigError: the device cannot multiply matrices in a dtype.
    """
    flops: dict[str, float] = {}
    for dtype in dtypes:
        factor = torch.ones(size, size, dtype=dtype, device=device)
        try:
            flops[dtype_name(dtype)] = 2 * size**3 / _fastest(partial(torch.mm, factor, factor), device)
        except RuntimeError as error:
            first = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"--dtypes {dtype_name(dtype)}: {device} has no product in this dtype: {first}; leave the dtype out"
            ) from error
    query = torch.ones(1, _HEADS, _TOKENS, _FEATURES, dtype=dtypes[0], device=device)
    attended = 4 * _HEADS * _TOKENS**2 * _FEATURES / _fastest(
        lambda: scaled_dot_product_attention(query, query, query), device
    )  # fmt: skip
    source, target = (torch.zeros(_COPIED // 4, device=device) for _ in range(2))
    one = torch.zeros(1, device=device)

    def launches() -> None:
        for _ in range(_LAUNCHES):
            one.add_(1)

    return DeviceRates(
        flops,
        min(1.0, attended / next(iter(flops.values()))),
        2 * _COPIED / _fastest(lambda: target.copy_(source), device),
        _fastest(launches, device) / _LAUNCHES,
        _memory_of(device),
    )


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of repeated calls."""
    with torch.no_grad():
        call()
        best, end = float("inf"), time.perf_counter() + _SECONDS
        while best == float("inf") or time.perf_counter() < end:
            start = synchronized_time(device)
            call()
            best = min(best, synchronized_time(device) - start)
    return max(best, 1e-9)


def _memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
