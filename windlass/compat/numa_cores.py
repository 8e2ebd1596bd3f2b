"""CPU cores of each NUMA node, and `numactl` commands that bind a rank to some of them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from windlass.launch.core_binding import one_thread_per_core

_NODES = Path("/sys/devices/system/node")


def cores_of_nodes() -> dict[int, list[int]]:
    """Return the cores of each NUMA node by its number. Numbers may have gaps.

    A node without cores has []. Empty if the system does not report nodes.
    """
    places = [place for place in _NODES.glob("node*") if place.name[4:].isdigit()] if _NODES.is_dir() else []
    found = sorted((int(place.name[4:]), place) for place in places)
    return {number: parse_range_list((place / "cpulist").read_text().strip()) for number, place in found}


def get_numa_cores() -> list[list[int]]:
    """Return the cores of each NUMA node, [] for a node without cores. Empty if the system does not report nodes."""
    return list(cores_of_nodes().values())


def nodes_with_cores() -> list[list[int]]:
    """Return the cores of each NUMA node that has cores."""
    return [cores for cores in get_numa_cores() if cores]


def parse_range(rng: str) -> list[int]:
    """Parse `3` or `2-5` into a list of core numbers.

    Raises:
        ValueError: the text has another form, or the range ends before it begins.
    """
    if (match := re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", rng)) is None:
        raise ValueError(f"{rng!r} is not a range of cores; write 3 or 2-5")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"the range of cores {rng!r} ends before it begins; write the smaller number first")
    return list(range(first, last + 1))


def parse_range_list(range_str: str) -> list[int]:
    """Parse `0-3,8,10-11` into a sorted list of core numbers.

    Raises:
        ValueError: see `parse_range`; or ranges overlap or are out of order.
    """
    cores: list[int] = []
    for part in range_str.split(",") if range_str.strip() else ():
        own = parse_range(part)
        if cores and own[0] <= cores[-1]:
            raise ValueError(
                f"the ranges of cores {range_str!r} overlap or are out of order; write each core once, in order"
            )
        cores += own
    return cores


def check_for_numactl_pkg() -> bool:
    """Return True if the `numactl` program is installed."""
    return shutil.which("numactl") is not None


def get_numactl_cmd(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> tuple[int, list[str]]:
    """Return the number of cores for each rank, and the command prefix that binds a rank to its cores.

    Args:
        bind_core_list: cores to use, such as `0-3,8-11`; None: one hardware thread of each core of the host.

    Raises:
        ValueError: fewer cores than ranks, or `KMP_AFFINITY` already binds cores.
    """
    if "KMP_AFFINITY" in os.environ:
        raise ValueError("KMP_AFFINITY already binds cores: unset it, or do not bind cores to ranks")
    nodes = {number: cores for number, cores in cores_of_nodes().items() if cores}
    if bind_core_list:
        cores = parse_range_list(bind_core_list)
    else:
        threads = sorted({thread for node in nodes.values() for thread in node}) or list(range(os.cpu_count() or 1))
        cores = one_thread_per_core(threads)
    each = len(cores) // num_local_procs
    if each < 1:
        raise ValueError(f"{num_local_procs} ranks share {len(cores)} cores: start fewer ranks, or list more cores")
    own = cores[local_rank * each : (local_rank + 1) * each]
    return each, ["numactl", *_memory_binding(own, nodes), "-C", _format_ranges(own)]


def _memory_binding(cores: Sequence[int], nodes: Mapping[int, list[int]]) -> list[str]:
    """Return the flags that bind memory to the one node that has all of these cores; [] if there is no such node.

    Args:
        nodes: cores of each node that has cores, by its number.
    """
    if len(nodes) < 2:
        return []
    matching_nodes = [number for number, node in nodes.items() if set(cores) <= set(node)]
    return ["-m", str(matching_nodes[0])] if matching_nodes else []


def _format_ranges(cores: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
