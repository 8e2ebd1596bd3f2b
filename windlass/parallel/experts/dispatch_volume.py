"""What a layer of experts sends along its axis: arithmetic alone."""

from __future__ import annotations

from collections.abc import Sequence

COUNT_BYTES = 8  # of how many rows come, one int64 an expert


def count_dispatch_bytes(
    tokens_per_expert: Sequence[Sequence[int]],
    spans: Sequence[tuple[int, int]],
    rank: int,
    *,
    hidden: int,
    itemsize: int,
    backward: bool = True,
) -> int:
    """What one rank receives from others for one layer, exactly.

    Rows come in for the experts here, and the experts elsewhere return those of the tokens here; the gradients of both
    go the other way, which is as many.

    Args:
        chosen: for each rank, how many of its slots each expert takes.
        spans: `[first, end)` of each rank's experts.
        rank: which.
        hidden: elements of a row.
        itemsize: bytes of one.
        backward: with the backward's.
    """
    first, end = spans[rank]
    inward = sum(sum(counts[first:end]) for other, counts in enumerate(tokens_per_expert) if other != rank)
    outward = sum(tokens_per_expert[rank]) - sum(tokens_per_expert[rank][first:end])
    rows = (inward + outward) * hidden * itemsize
    return rows * (2 if backward else 1) + (len(spans) - 1) * (end - first) * COUNT_BYTES
