"""Memory of known GPUs, and the memory limits of a rank."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.base.byte_counts import parse_bytes
from windlass.base.errors import ConfigError
from windlass.plan.memory_plan import DEVICE, DISK, HOST, MemoryPlan

PLACES = (DEVICE, HOST, DISK)
_GIB = 1 << 30

GPUS: dict[str, int] = {
    "t4": 15 * _GIB,
    "rtx3090": 24 * _GIB,
    "rtx4090": 24 * _GIB,
    "l4": 22 * _GIB,
    "a10": 22 * _GIB,
    "v100": 16 * _GIB,
    "v100-32": 32 * _GIB,
    "l40s": 44 * _GIB,
    "a100-40": 39 * _GIB,
    "a100": 79 * _GIB,
    "h100": 79 * _GIB,
    "h200": 140 * _GIB,
    "b200": 178 * _GIB,
}
"""Usable memory of GPUs by name, in bytes: often somewhat below the advertised number."""

RESERVED_SHARE = 0.05
"""Share of a GPU's memory that is left for the CUDA context, NCCL, workspaces and fragmentation, at least 1 GiB.
Assumed, not measured.
"""


@dataclass(frozen=True)
class RankLimits:
    """Memory that one rank may use, in bytes; None: unlimited.

    Attributes:
        device: Memory of the rank's GPU; None on a CPU.
        host: The rank's part of the host's memory.
        disk: The rank's part of the NVMe space.
    """

    device: int | None = None
    host: int | None = None
    disk: int | None = None

    def of(self, place: str) -> int | None:
        """Return the limit of `device`, `host` or `disk`."""
        found: int | None = getattr(self, place)
        return found


def missing_bytes(plan: MemoryPlan, limits: RankLimits) -> dict[str, int]:
    """Return, by place, the bytes by which a plan exceeds its limits; empty if the plan fits."""
    pairs = [(place, limits.of(place)) for place in PLACES]
    return {place: plan.peak(place) - most for place, most in pairs if most is not None and plan.peak(place) > most}


def gpu_bytes(name: str) -> int:
    """Return the bytes that a run may use on a GPU, without the reserved share.

    Args:
        name: Name of a known GPU (`h200`), or its total memory (`80GB`).

    Raises:
        ConfigError: `name` is neither a known GPU nor a size, or is not larger than the reserved share.
    """
    total = GPUS.get(name.lower())
    if total is None:
        try:
            total = parse_bytes(name, "--gpu")
        except ConfigError:
            raise ConfigError(
                f"--gpu {name!r} is neither a known GPU nor a size; write one of {', '.join(GPUS)}, or 80GB"
            ) from None
    reserved = max(_GIB, int(RESERVED_SHARE * total))
    if total <= reserved:
        raise ConfigError(f"--gpu {name!r} leaves nothing beside the 1 GiB of the CUDA context; name a larger one")
    return total - reserved
