"""Binding of ranks to processor cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from windlass.launch.launch_errors import LaunchError
from windlass.launch.visible_devices import parse_numbers

CORES_VARIABLE = "WINDLASS_CORES"
"""Variable in a rank's environment: the cores to which the rank binds itself before it runs the user's program."""


def core_share(cores: Sequence[int], ranks: int, local_rank: int) -> list[int]:
    """Return this rank's equal share of `cores`, in their order. Cores that do not divide evenly stay unused.

    Raises:
        LaunchError: there are fewer cores than ranks.
    """
    each = len(cores) // ranks
    if each < 1:
        raise LaunchError(
            f"--bind_cores_to_rank: {len(cores)} cores for {ranks} ranks; start fewer ranks or name more cores"
        )
    return list(cores[each * local_rank : each * (local_rank + 1)])


def bindable_cores(listed: str | None) -> list[int]:
    """Return the cores of `--bind_core_list`, or by default one hardware thread of each core that this process may use.

    Raises:
        LaunchError: the list cannot be parsed, names a core twice, or names a core that this process may not use.
    """
    usable = usable_cores()
    if listed is None:
        return one_thread_per_core(usable)
    cores = parse_numbers(listed, "--bind_core_list")
    if len(set(cores)) != len(cores):
        raise LaunchError(f"--bind_core_list {listed} lists a core twice; list each core once")
    strange = [core for core in cores if core not in usable]
    if strange:
        raise LaunchError(
            f"--bind_core_list {listed}: core {strange[0]} does not exist or is not allowed; this process may use "
            f"{','.join(map(str, usable))}"
        )
    return cores


def usable_cores() -> list[int]:
    """Return the logical cores that this process may run on.

    Raises:
        LaunchError: this system cannot bind processes to cores.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    if affinity is None:
        raise LaunchError("--bind_cores_to_rank: this system cannot bind processes to cores; only Linux can")
    return sorted(affinity(0))


def one_thread_per_core(usable: Sequence[int]) -> list[int]:
    """Return the hardware threads in `usable` without those that share a core with an earlier one."""
    seen: set[str] = set()
    kept = []
    for core in usable:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text().strip()
        except OSError:  # a container may hide the topology: count each thread as a core
            siblings = str(core)
        if siblings not in seen:
            seen.add(siblings)
            kept.append(core)
    return kept
