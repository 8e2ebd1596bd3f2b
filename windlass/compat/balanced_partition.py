"""Cuts a row of things into neighbouring parts of equal number or of equal weight."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """The sum of all weights up to each, itself included."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Where each part begins, and the end of the last: part p is `[bounds[p], bounds[p + 1])`. The first parts are one
    longer where the number does not divide; parts may be empty."""
    size, longer = divmod(num_items, num_parts)
    return [part * size + min(part, longer) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """As `partition_uniform`, with the heaviest part as light as can be, by dynamic programming; of cuts that tie, one
    whose lightest part is heaviest, and whose last parts are shortest.

    Source: the linear partition problem, Skiena, "The Algorithm Design Manual", section 10.7.
    """
    count = len(weights)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    sums = [0.0, *prefix_sum_inc(weights)]
    # (heaviest, -lightest, minus where the last part begins) of the first n items in p parts
    best: list[list[tuple[float, float, int]]] = [[(sums[n], -sums[n], 0) for n in range(count + 1)]]
    for parts in range(2, num_parts + 1):
        row = [(float("inf"), 0.0, 0)] * (count + 1)
        for n in range(parts, count + 1):
            row[n] = min(
                (max(best[-1][cut][0], sums[n] - sums[cut]), max(best[-1][cut][1], sums[cut] - sums[n]), -cut)
                for cut in range(parts - 1, n)
            )
        best.append(row)
    bounds = [count]
    for row in reversed(best):
        bounds.append(-row[bounds[-1]][2])
    return bounds[::-1]
