"""Which cores each rank is bound to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from windlass.launch.launch_errors import LaunchError
from windlass.launch.visible_devices import parse_numbers

CORES_VARIABLE = "WINDLASS_CORES"
"""In a rank's environment: the cores that it binds itself to before it becomes the user's program."""


def core_share(cores: Sequence[int], ranks: int, local_rank: int) -> list[int]:
    """An equal share of `cores`, in their order; what cannot be shared evenly is left over.

    Raises:
        LaunchError: fewer cores than ranks.
    """
    each = len(cores) // ranks
    if each < 1:
        raise LaunchError(
            f"--bind_cores_to_rank: {len(cores)} cores for {ranks} ranks; start fewer ranks or name more cores"
        )
    return list(cores[each * local_rank : each * (local_rank + 1)])


def bindable_cores(listed: str | None) -> list[int]:
    """The cores of `--bind_core_list`, else one of each core's threads among those that this process may use.

    Raises:
        LaunchError: a list that is none, a core twice, or one that this process may not use.
    """
    usable = usable_cores()
    if listed is None:
        return _one_thread_per_core(usable)
    cores = parse_numbers(listed, "--bind_core_list")
    if len(set(cores)) != len(cores):
        raise LaunchError(f"--bind_core_list {listed} names a core twice; name each once")
    strange = [core for core in cores if core not in usable]
    if strange:
        raise LaunchError(
            f"--bind_core_list {listed}: core {strange[0]} is not there or not allowed; this process may use "
            f"{','.join(map(str, usable))}"
        )
    return cores


def usable_cores() -> list[int]:
    """The logical cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    if affinity is None:
        raise LaunchError("--bind_cores_to_rank: this system binds no process to cores; only Linux does")
    return sorted(affinity(0))


def _one_thread_per_core(usable: Sequence[int]) -> list[int]:
    seen: set[str] = set()
    kept = []
    for core in usable:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text().strip()
        except OSError:  # a container may hide it: each counts as a core of its own
            siblings = str(core)
        if siblings not in seen:
            seen.add(siblings)
            kept.append(core)
    return kept
