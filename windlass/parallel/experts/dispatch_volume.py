"""Formula for the bytes that an expert layer receives along its axis."""

from __future__ import annotations

from collections.abc import Sequence

COUNT_BYTES = 8  # row counts are sent as one int64 an expert


def count_dispatch_bytes(
    tokens_per_expert: Sequence[Sequence[int]],
    spans: Sequence[tuple[int, int]],
    rank: int,
    *,
    hidden: int,
    itemsize: int,
    backward: bool = True,
) -> int:
    """Compute the exact bytes that one rank receives from other ranks for one layer.

    In the forward, local experts receive rows of other ranks, and remote experts return the outputs of local tokens. In
    the backward, the gradients of both take the opposite way, with the same number of bytes.

    Args:
        tokens_per_expert: for each rank, the number of its slots that each expert takes.
        spans: `[first, end)` of each rank's experts.
        rank: the receiving rank.
        hidden: elements of a row.
        itemsize: bytes of an element.
        backward: include the backward.
    """
    first, end = spans[rank]
    inward = sum(sum(counts[first:end]) for other, counts in enumerate(tokens_per_expert) if other != rank)
    outward = sum(tokens_per_expert[rank]) - sum(tokens_per_expert[rank][first:end])
    rows = (inward + outward) * hidden * itemsize
    return rows * (2 if backward else 1) + (len(spans) - 1) * (end - first) * COUNT_BYTES
