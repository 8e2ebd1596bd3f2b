"""Targets of windlass on one workload, and their outcome."""

from __future__ import annotations

from rig.job import Size
from rig.measure import Measured

# Step time over that of `none`, in shared memory.
SPEED = {"windlass-0-shm": 1.10, "windlass-1-shm": 1.02, "windlass-2-shm": 1.02, "windlass-3-shm": 1.08}
# Step time over that of a rival, both over gloo.
AGAINST = {
    "windlass-0-gloo": ("ddp", 1.0),
    "windlass-1-gloo": ("ddp", 1.0),
    "windlass-2-gloo": ("ddp", 1.0),
    "windlass-3-gloo": ("fsdp3", 0.7),
}
# Peak proportional bytes per parameter, fp32, two ranks. At stages 1 to 3, parameters, gradients and moments alone take
# 12, 10 and 8.
MEMORY = {"windlass-1-shm": 15.0, "windlass-2-shm": 13.0, "windlass-3-shm": 11.0}


def speed_target(measured: Measured, engine: str) -> float | None:
    """Return the maximum step time of `engine`, as a multiple of `none`; None without a target, or if the
    rival was not timed."""
    if not _promised(measured):
        return None
    if engine in SPEED:
        return SPEED[engine]
    rival, share = AGAINST.get(engine, ("", 0.0))
    known = measured.results.get(rival)
    return share * known.ratio if known is not None and known.rounds else None


def memory_target(measured: Measured, engine: str) -> float | None:
    """Return the maximum bytes per parameter of `engine`; None without a target."""
    return MEMORY.get(engine) if _promised(measured) else None


def missed(measured: Measured) -> list[str]:
    """Return one sentence for each missed target."""
    results = []
    for engine, result in measured.results.items():
        target, limit = speed_target(measured, engine), memory_target(measured, engine)
        if target is not None and result.rounds and result.ratio > target:
            results.append(f"{engine}: {result.ratio:.3f} x none, target {target:.3f}")
        if limit is not None and result.memory and result.bytes_per_parameter > limit:
            results.append(f"{engine}: {result.bytes_per_parameter:.1f} bytes a parameter, target {limit:.1f}")
    return results


def _promised(measured: Measured) -> bool:
    """Return True if targets apply to this size and number of ranks. At small sizes constant costs dominate."""
    return measured.size == Size() and measured.ranks == 2
