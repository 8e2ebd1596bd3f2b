"""Distribution of the elements of a dimension over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from windlass.parallel.placement import Ranges, compute_shard_range

RankRanges = tuple[Ranges, ...]
"""For each rank of the axis, its ranges `[start, stop)` of a dimension."""

# Candidates for the number of features that stay together if `ranks` does not divide `size`: matrix units are
# efficient at multiples of these.
_GRAINS = (128, 64, 32, 16, 8)


def compute_shard_grain(size: int, ranks: int) -> int:
    """Return the number of features that stay together when `size` features are distributed over `ranks`.

    If `ranks` divides `size`, the grain is the full share. Otherwise it is a multiple of 8 for which the largest share
    exceeds the mean by at most an eighth, if there is one; else 8 or less, so that every rank gets a feature if
    possible.
    """
    if size % ranks == 0:
        return max(size // ranks, 1)
    fitting = [grain for grain in _GRAINS if size % grain == 0 and size // grain >= 8 * ranks]
    if fitting:
        return fitting[0]
    return next(grain for grain in (8, 4, 2, 1) if size % grain == 0 and (size // grain >= ranks or grain == 1))


def make_even_ranges(size: int, ranks: int, grain: int | None = None) -> RankRanges:
    """Distribute `size` elements as evenly as `grain` allows; by default `compute_shard_grain` chooses it."""
    grain = compute_shard_grain(size, ranks) if grain is None else grain
    return tuple((compute_shard_range(size, ranks, rank, grain=grain),) for rank in range(ranks))


def make_expert_ranges(size: int, ranks: int) -> RankRanges:
    """Distribute the intermediate features of each expert, in multiples of 8 if possible: grouped matrix products
    require rows that are multiples of 16 bytes."""
    grain = next(grain for grain in (8, 4, 2, 1) if size % grain == 0 and (size // grain >= ranks or grain == 1))
    return make_even_ranges(size, ranks, grain)


def scale_ranges(spans: Sequence[tuple[int, int]], grain: int) -> RankRanges:
    """Convert spans of items (heads) to ranges of elements, with `grain` elements per item."""
    return tuple(((start * grain, stop * grain),) for start, stop in spans)


def join_sections(sections: Sequence[tuple[int, RankRanges]]) -> RankRanges:
    """Join consecutive sections along a dimension, each given by its size and its ranges of all ranks.

    Adjacent ranges of a rank are merged, also across sections; the order is kept.
    """
    ranks = len(sections[0][1])
    found: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    offset = 0
    for size, shares in sections:
        for local, ranges in zip(found, shares, strict=True):
            for start, stop in ranges:
                if local and local[-1][1] == start + offset:
                    local[-1] = (local[-1][0], stop + offset)
                else:
                    local.append((start + offset, stop + offset))
        offset += size
    return tuple(tuple(ranges) for ranges in found)


def count_elements(ranges: Iterable[tuple[int, int]]) -> int:
    """Return the number of elements in these ranges."""
    return sum(stop - start for start, stop in ranges)


def count_rank_elements(rank_ranges: RankRanges) -> list[int]:
    """Return the number of elements of each rank."""
    return [count_elements(ranges) for ranges in rank_ranges]
