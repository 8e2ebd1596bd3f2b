"""Partition of a sequence into contiguous parts of equal length or of equal weight."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Return the inclusive prefix sums of the weights."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the bounds of `num_parts` contiguous parts: part p is `[bounds[p], bounds[p + 1])`.

    The first parts are one item longer if `num_parts` does not divide `num_items`. Parts may be empty.
    """
    size, longer = divmod(num_items, num_parts)
    return [part * size + min(part, longer) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return bounds, as `partition_uniform` does, that minimize the weight of the heaviest part.

    The bounds are computed by dynamic programming over prefixes of `weights`. Of two equally good splits of a prefix,
    the one with the heavier lightest part is kept, then the one with the shorter last part.

    Source: the linear partition problem, Skiena, "The Algorithm Design Manual", section 10.7.
    """
    count = len(weights)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    sums = [0.0, *prefix_sum_inc(weights)]
    # best[p - 1][n] = (heaviest, -lightest, -start of the last part) for the first n items in p parts
    best: list[list[tuple[float, float, int]]] = [[(sums[n], -sums[n], 0) for n in range(count + 1)]]
    for parts in range(2, num_parts + 1):
        row = [(float("inf"), 0.0, 0)] * (count + 1)
        for n in range(parts, count + 1):
            row[n] = min(
                (max(best[-1][start][0], sums[n] - sums[start]), max(best[-1][start][1], sums[start] - sums[n]), -start)
                for start in range(parts - 1, n)
            )
        best.append(row)
    bounds = [count]
    for row in reversed(best):
        bounds.append(-row[bounds[-1]][2])
    return bounds[::-1]
