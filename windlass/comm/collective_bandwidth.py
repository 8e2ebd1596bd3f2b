"""Sizes and bandwidths of collectives, as defined by DeepSpeed's log and nccl-tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
_ALL_TO_ALL = frozenset({"all_to_all", "all_to_all_single"})
_GATHERING = frozenset(
    {"all_gather", "all_gather_into_tensor", "all_gather_coalesced", "reduce_scatter", "reduce_scatter_tensor"}
)
_ALL_REDUCE = frozenset({"all_reduce", "all_reduce_coalesced", "inference_all_reduce"})


def convert_size(size_bytes: int) -> str:
    """Format bytes in the unit in which they are less than 1024, to two decimals: `1.5 MB`."""
    if size_bytes == 0:
        return "0B"
    value, unit = float(size_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{round(value, 2)} {_UNITS[unit]}"


def calc_bw_log(comm_op: str, size: int, duration: float, ranks: int | None = None) -> tuple[float, float]:
    """Return the algorithmic and the bus bandwidth of one operation, in Gbit/s.

    The algorithmic bandwidth is DeepSpeed's: bytes over time, where an all-reduce counts twice its bytes, and a gather
    or reduce-scatter the bytes of all ranks. The bus bandwidth is that of nccl-tests (its doc/PERFORMANCE.md): the
    traffic of a link, comparable with the link's speed for any number of ranks. Both are 0 if `duration` is 0.

    Args:
        comm_op: Name of the operation. For an unknown name, both bandwidths are bytes over time.
        size: Bytes of this rank's message; for a reduce-scatter, of this rank's result.
        duration: Duration in milliseconds.
        ranks: Number of ranks of the group; by default of the world.
    """
    if ranks is None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
    if duration <= 0:
        return 0.0, 0.0
    share = (ranks - 1) / ranks
    if comm_op in _ALL_TO_ALL:
        algorithmic, bus = float(size), size * share
    elif comm_op in _GATHERING:
        algorithmic, bus = float(size * ranks), size * ranks * share
    elif comm_op in _ALL_REDUCE:
        algorithmic, bus = 2.0 * size, 2 * size * share
    else:
        algorithmic = bus = float(size)
    bits_over_ms = 8 / duration / 1e6
    return algorithmic * bits_over_ms, bus * bits_over_ms


def trimmed_mean(values: Sequence[float], share: float = 0.1) -> float:
    """Return the mean without the smallest and the largest `share` of the values; 0 if there are no values."""
    if not values:
        return 0.0
    dropped = int(len(values) * share)
    kept = sorted(values)[dropped : len(values) - dropped]
    return sum(kept) / len(kept)
