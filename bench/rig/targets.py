"""Targets of windlass on one workload, and their outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rig.job import Size

if TYPE_CHECKING:
    from rig.measure import Measured

# Step time over that of `none`, in shared memory.
SPEED = {"windlass-0-shm": 1.03, "windlass-1-shm": 1.02, "windlass-2-shm": 1.02, "windlass-3-shm": 1.05}
# Step time over that of a rival in the same rounds, both over gloo.
AGAINST = {
    "windlass-0-gloo": ("ddp", 1.0),
    "windlass-1-gloo": ("ddp", 1.0),
    "windlass-2-gloo": ("ddp", 1.0),
    "windlass-3-gloo": ("fsdp3", 0.6),
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
    result = measured.results[engine]
    if engine in AGAINST and result.rival_ratio is not None:
        return AGAINST[engine][1] * result.ratio / result.rival_ratio
    return None


def memory_target(measured: Measured, engine: str) -> float | None:
    """Return the maximum bytes per parameter of `engine`; None without a target."""
    return MEMORY.get(engine) if _promised(measured) else None


def missed(measured: Measured) -> list[str]:
    """Return one sentence for each missed target."""
    results = []
    for engine, result in measured.results.items():
        target, limit = speed_target(measured, engine), memory_target(measured, engine)
        if target is not None and result.rounds and result.ratio > target:
            if engine in AGAINST:
                rival, share = AGAINST[engine]
                results.append(f"{engine}: {result.rival_ratio:.3f} x {rival}, target {share:.3f}")
            else:
                results.append(f"{engine}: {result.ratio:.3f} x none, target {target:.3f}")
        if limit is not None and result.memory and result.bytes_per_parameter > limit:
            results.append(f"{engine}: {result.bytes_per_parameter:.1f} bytes a parameter, target {limit:.1f}")
    return results


def _promised(measured: Measured) -> bool:
    """Return True if targets apply to this size and number of ranks. At small sizes constant costs dominate."""
    return measured.size == Size() and measured.ranks == 2
