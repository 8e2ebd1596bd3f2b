"""Which elements of a dimension each rank has: arithmetic alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from windlass.parallel.placement import Ranges, compute_shard_range

RankRanges = tuple[Ranges, ...]
"""For each rank of the axis, the ranges `[start, stop)` of a dimension that it has."""

_GRAINS = (128, 64, 32, 16, 8)  # features that stay together where sizes don't divide: matrix units like such multiples


def compute_shard_grain(size: int, ranks: int) -> int:
    """How many features stay together when `size` of them are spread over `ranks`.

    All of a rank's where that divides. Else a multiple of 8 that leaves the largest share at most an eighth above the
    mean, if there is one; else 8 or less, so that every rank gets something where that is possible.
    """
    if size % ranks == 0:
        return max(size // ranks, 1)
    fitting = [grain for grain in _GRAINS if size % grain == 0 and size // grain >= 8 * ranks]
    if fitting:
        return fitting[0]
    return next(grain for grain in (8, 4, 2, 1) if size % grain == 0 and (size // grain >= ranks or grain == 1))


def make_even_ranges(size: int, ranks: int, grain: int | None = None) -> RankRanges:
    """`size` elements spread as evenly as `grain` allows; by default `grain_of` chooses it."""
    grain = compute_shard_grain(size, ranks) if grain is None else grain
    return tuple((compute_shard_range(size, ranks, rank, grain=grain),) for rank in range(ranks))


def scale_ranges(spans: Sequence[tuple[int, int]], grain: int) -> RankRanges:
    """Spans of things (heads) as ranges of elements, `grain` of them for each thing."""
    return tuple(((start * grain, stop * grain),) for start, stop in spans)


def join_sections(sections: Sequence[tuple[int, RankRanges]]) -> RankRanges:
    """Sections that lie one after another along a dimension, each with its size and its shares, as one.

    A rank's ranges that touch become one; those of different sections are kept in order.
    """
    ranks = len(sections[0][1])
    found: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    offset = 0
    for size, shares in sections:
        for mine, ranges in zip(found, shares, strict=True):
            for start, stop in ranges:
                if mine and mine[-1][1] == start + offset:
                    mine[-1] = (mine[-1][0], stop + offset)
                else:
                    mine.append((start + offset, stop + offset))
        offset += size
    return tuple(tuple(ranges) for ranges in found)


def count_elements(ranges: Iterable[tuple[int, int]]) -> int:
    """How many elements these ranges hold."""
    return sum(stop - start for start, stop in ranges)


def count_rank_elements(rank_ranges: RankRanges) -> list[int]:
    """How many elements each rank has."""
    return [count_elements(ranges) for ranges in rank_ranges]
