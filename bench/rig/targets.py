"""What windlass promises on this work, and whether it was kept."""

from __future__ import annotations

from rig.measure import Result

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


def speed_target(engine: str, results: dict[str, Result]) -> float | None:
    """The most that `engine` may take, as a multiple of `none`; None without a promise or the rival to compare with."""
    if engine in SPEED:
        return SPEED[engine]
    rival, share = AGAINST.get(engine, (None, 0.0))
    if rival is None or rival not in results or not results[rival].rounds:
        return None
    return share * results[rival].ratio


def missed(results: dict[str, Result]) -> list[str]:
    """One sentence for each promise that was not kept."""
    found = []
    for engine, result in results.items():
        target = speed_target(engine, results)
        if target is not None and result.rounds and result.ratio > target:
            found.append(f"{engine}: {result.ratio:.3f} x none, target {target:.3f}")
        limit = MEMORY.get(engine)
        if limit is not None and result.memory and result.bytes_per_parameter > limit:
            found.append(f"{engine}: {result.bytes_per_parameter:.1f} bytes a parameter, target {limit:.1f}")
    return found
