"""Targets of windlass on one piece of work, and their outcome."""

from __future__ import annotations

from rig.job import Size
from rig.measure import Measured

# Step time over that of `none`, in shared memory.
SPEED = {"windlass-0-shm": 1.10, "windlass-1-shm": 1.02, "windlass-2-shm": 1.02, "windlass-3-shm": 1.08}
# Step time over that of a rival, where both talk through gloo.
AGAINST = {
    "windlass-0-gloo": ("ddp", 1.0),
    "windlass-1-gloo": ("ddp", 1.0),
    "windlass-2-gloo": ("ddp", 1.0),
    "windlass-3-gloo": ("fsdp3", 0.7),
}
# Peak proportional bytes a parameter, fp32, two ranks; the states alone are 12, 10 and 8.
MEMORY = {"windlass-1-shm": 15.0, "windlass-2-shm": 13.0, "windlass-3-shm": 11.0}


def speed_target(measured: Measured, engine: str) -> float | None:
    """The most that `engine` may take, as a multiple of `none`; None without a promise or the rival to compare with."""
    if not _promised(measured):
        return None
    if engine in SPEED:
        return SPEED[engine]
    rival, share = AGAINST.get(engine, ("", 0.0))
    known = measured.results.get(rival)
    return share * known.ratio if known is not None and known.rounds else None


def memory_target(measured: Measured, engine: str) -> float | None:
    """The most bytes a parameter that `engine` may take; None without a promise."""
    return MEMORY.get(engine) if _promised(measured) else None


def missed(measured: Measured) -> list[str]:
    """One sentence for each promise that was not kept."""
    found = []
    for engine, result in measured.results.items():
        target, limit = speed_target(measured, engine), memory_target(measured, engine)
        if target is not None and result.rounds and result.ratio > target:
            found.append(f"{engine}: {result.ratio:.3f} x none, target {target:.3f}")
        if limit is not None and result.memory and result.bytes_per_parameter > limit:
            found.append(f"{engine}: {result.bytes_per_parameter:.1f} bytes a parameter, target {limit:.1f}")
    return found


def _promised(measured: Measured) -> bool:
    """A promise holds for the size and the ranks that it was given for; constant costs rule where these are small."""
    return measured.size == Size() and measured.ranks == 2
