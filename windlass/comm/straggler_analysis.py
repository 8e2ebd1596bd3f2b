"""Straggler analysis: the time that each rank waited for later ranks, from its latencies and the minimum over ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from windlass.comm.collective_bandwidth import convert_size, trimmed_mean


def analyze_stragglers(records: dict[str, dict[int, list[Any]]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return each operation's latency without waiting, and the time this rank waited. Collective.

    The last rank to arrive at an operation measures the latency alone; the others measure the latency and their wait.
    Operations are matched by name, size and order. If ranks recorded an operation different numbers of times (a send,
    or an operation of a subgroup), only ranks with the same count as this one are compared.

    Args:
        records: Records of this rank, as in `CommsLogger.comms_dict`.
    """
    mine = {(name, size): record[1] for name, sizes in records.items() for size, record in sizes.items()}
    everyone = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
    late: dict[str, dict[int, dict[str, Any]]] = {}
    for (name, size), latencies in sorted(mine.items()):
        comparable = [other[name, size] for other in everyone if len(other.get((name, size), ())) == len(latencies)]
        least = [min(times) for times in zip(*comparable, strict=True)]
        waited = [own - best for own, best in zip(latencies, least, strict=True)]
        late.setdefault(name, {})[size] = {
            "count": len(latencies),
            "total_comm_lat_ms": sum(least),
            "total_straggler_ms": sum(waited),
            "avg_comm_lat_ms": trimmed_mean(least),
            "avg_straggler_ms": trimmed_mean(waited),
            "msg_size_bytes": size,
            "msg_size_str": convert_size(size),
        }
    return late
