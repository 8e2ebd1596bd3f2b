"""Known devices, links and hosts, and their rates.

Peak rates are those of the vendors' data sheets, without sparsity. `matmul_efficiency` of the H200 is the share of its
peak that a bf16 product of 8192^3 reached (770 to 800 of 989 TFLOP/s, torch 2.11); other GPUs are assumed to reach the
same. `attention_efficiency` is the share that fused attention reaches in the papers of FlashAttention-2 (A100: 0.6)
and FlashAttention-3 (its measurement of version 2 on H100: 0.35); 0: attention is not fused. No rate is fitted to a
published training run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from windlass.base.errors import ConfigError

_SCALE = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY_SCALE = {prefix: 1024.0**power for power, prefix in enumerate(_SCALE)}
_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGTP]?)(i?)(bps|bit/s|B/s|FLOP/s|FLOPS|flops|)\s*", re.ASCII)
_SECONDS = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|ms|us|ns)\s*", re.ASCII)
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_AS_WIDE = {
    "fp8": ("bf16", "fp16", "fp32", "fp64"),
    "bf16": ("fp16", "fp32", "fp64"),
    "fp16": ("bf16", "fp32", "fp64"),
    "fp32": ("fp64",),
    "fp64": (),
}
"""For each dtype, the other dtypes of equal or larger width, from the narrowest to the widest."""


@dataclass(frozen=True)
class DevicePart:
    """Accelerator, or the one CPU core that a rank computes on.

    Attributes:
        flops: Peak FLOP/s of matrix products, by short dtype name.
        memory: Bytes of the device's memory.
        memory_rate: Bytes a second that the device's memory reads and writes, counted together.
        matmul_efficiency: Share of `flops` that a large product reaches.
        attention_efficiency: Share of `flops` that fused attention reaches; 0: scores are written to memory.
        memory_efficiency: Share of `memory_rate` that a copy reaches.
        launch_seconds: Time of the smallest operation.
    """

    name: str
    flops: dict[str, float]
    memory: int
    memory_rate: float
    matmul_efficiency: float = 0.79
    attention_efficiency: float = 0.35
    memory_efficiency: float = 0.85
    launch_seconds: float = 5e-6

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of a dtype, or, without an entry in `flops`, of the next dtype of equal or larger
        width.

        Raises:
            ConfigError: only narrower dtypes have an entry. Their rates are too high for this dtype.
        """
        for name in (dtype, *_AS_WIDE[dtype]):
            if name in self.flops:
                return self.flops[name]
        raise ConfigError(
            f"device.flops of {self.name} has {', '.join(self.flops)}, and products are in {dtype}: add the rate of "
            f'{dtype} to a cluster file, e.g. {dtype} = "60TFLOP/s" in device.flops'
        )


@dataclass(frozen=True)
class LinkPart:
    """Link between devices or hosts, or of a device to host memory. Rates are bytes a second in each direction.

    Attributes:
        latency: Seconds from the start of a small message until its arrival.
        efficiency: Share of `rate` that a large message reaches.
    """

    rate: float
    latency: float = 0.0
    efficiency: float = 0.85

    @property
    def usable(self) -> float:
        """Bytes a second of a large message."""
        return self.rate * self.efficiency


@dataclass(frozen=True)
class HostPart:
    """Host with its devices.

    Attributes:
        devices: Number of devices.
        device_link: Link of each device to the others of the host.
        mesh: Connection of the devices: `switch` (NVSwitch, PCIe), `mesh` (a link for each pair, of `device_link`'s
            rate divided by the number of peers) or `ring`.
        nic: Link of one network card to the network.
        nics: Number of network cards.
        host_link: Link of each device to host memory; None: the devices compute in host memory.
        memory_rate: Rate of host memory, for optimizer updates on the host; for all updates if the devices have no
            memory of their own.
        disk_read, disk_write: Rates of all disks of the host together; 0: no disk.
        axis_links: Links of the devices in collectives and messages along one mesh axis ("tp", "sp", "ep", "pp"), where
            they differ from `device_link`: on CPUs a rate depends on the algorithm and on the number of ranks. Traffic
            on these links and other transfers do not slow each other down.
    """

    name: str
    devices: int
    device_link: LinkPart
    nic: LinkPart
    nics: int = 1
    mesh: str = "switch"
    host_link: LinkPart | None = None
    memory_rate: float = 100e9
    disk_read: float = 0.0
    disk_write: float = 0.0
    axis_links: Mapping[str, LinkPart] = field(default_factory=dict)


@dataclass(frozen=True)
class KnownCluster:
    """Device and host that belong together, and the usual topology between such hosts."""

    device: str
    host: str
    topology: str


_G, _T, _GIB = 1e9, 1e12, 1 << 30

DEVICES: dict[str, DevicePart] = {
    part.name: part
    for part in (
        DevicePart("v100", {"fp16": 125 * _T, "fp32": 15.7 * _T}, 32 * _GIB, 900 * _G, attention_efficiency=0.0),
        DevicePart(
            "a100", {"bf16": 312 * _T, "fp16": 312 * _T, "fp32": 156 * _T}, 80 * _GIB, 2039 * _G,
            attention_efficiency=0.6,
        ),
        DevicePart(
            "h100", {"fp8": 1979 * _T, "bf16": 989 * _T, "fp16": 989 * _T, "fp32": 494 * _T}, 80 * _GIB, 3350 * _G
        ),
        DevicePart(
            "h100-96", {"fp8": 1979 * _T, "bf16": 989 * _T, "fp16": 989 * _T, "fp32": 494 * _T}, 96 * _GIB, 2400 * _G
        ),
        DevicePart(
            "h200", {"fp8": 1979 * _T, "bf16": 989 * _T, "fp16": 989 * _T, "fp32": 494 * _T}, 141 * _GIB, 4800 * _G
        ),
        DevicePart(
            "cpu", {"fp32": 100 * _G, "bf16": 100 * _G}, 16 * _GIB, 10 * _G, attention_efficiency=0.5,
            launch_seconds=2e-5,
        ),
    )
}  # fmt: skip
"""Devices by name. `cpu` is one core with AVX-512; `windlass bench device` measures other devices."""

_NVLINK2, _NVLINK3, _NVLINK4 = LinkPart(150 * _G, 4e-6), LinkPart(300 * _G, 4e-6), LinkPart(450 * _G, 4e-6)
_EDR, _HDR, _NDR = LinkPart(12.5 * _G, 8e-6), LinkPart(25 * _G, 8e-6), LinkPart(50 * _G, 8e-6)
_PCIE3, _PCIE4, _PCIE5 = LinkPart(16 * _G, 1e-5), LinkPart(32 * _G, 1e-5), LinkPart(64 * _G, 1e-5)

HOSTS: dict[str, HostPart] = {
    part.name: part
    for part in (
        HostPart("dgx2", 16, _NVLINK2, _EDR, 8, host_link=_PCIE3, memory_rate=120 * _G, disk_read=25.6 * _G,
                 disk_write=20 * _G),
        HostPart("dgx-a100", 8, _NVLINK3, _HDR, 8, host_link=_PCIE4, memory_rate=200 * _G, disk_read=25 * _G,
                 disk_write=20 * _G),
        HostPart("dgx-h100", 8, _NVLINK4, _NDR, 8, host_link=_PCIE5, memory_rate=300 * _G, disk_read=48 * _G,
                 disk_write=26 * _G),
        HostPart("cpu-host", 2, LinkPart(5 * _G, 5e-5), LinkPart(1.25 * _G, 5e-5), 1, memory_rate=20 * _G,
                 disk_read=3 * _G, disk_write=3 * _G),
    )
}  # fmt: skip
"""Hosts by name."""

CLUSTERS: dict[str, KnownCluster] = {
    "dgx2": KnownCluster("v100", "dgx2", "fat-tree"),
    "dgx-a100": KnownCluster("a100", "dgx-a100", "rail"),
    "dgx-h100": KnownCluster("h100", "dgx-h100", "rail"),
    "dgx-h200": KnownCluster("h200", "dgx-h100", "rail"),
    "cpu": KnownCluster("cpu", "cpu-host", "switch"),
}
"""Clusters by the name for `--cluster`, with as many hosts as the ranks need."""


def parse_rate(value: object, key: str) -> float:
    """Parse a rate: `400Gbps`, `25GB/s`, `989TFLOP/s`, or a plain number of bytes (or operations) a second.

    Raises:
        ConfigError: the value is not a positive rate.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf"):
        return float(value)
    found = _RATE.fullmatch(value) if isinstance(value, str) else None
    if found is None or not float(found[1]):
        raise ConfigError(f"{key} = {value!r} is not a rate; write e.g. 400Gbps, 25GB/s or 989TFLOP/s")
    number = float(found[1]) * (_BINARY_SCALE if found[3] else _SCALE)[found[2]]
    return number / 8 if found[4] in ("bps", "bit/s") else number


def parse_seconds(value: object, key: str) -> float:
    """Parse a time: `5us`, `2ms`, or a plain number of seconds.

    Raises:
        ConfigError: the value is not a time.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    found = _SECONDS.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ConfigError(f"{key} = {value!r} is not a time; write e.g. 5us or 2ms")
    return float(found[1]) * _UNITS[found[2]]
