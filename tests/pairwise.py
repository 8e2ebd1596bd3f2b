"""Deterministic generator of covering arrays: every pair of values of two factors occurs in some row."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
Pair = tuple[str, int, str, int]


def pairwise(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Return rows that together cover every pair of values that some allowed row can have.

    Greedy: each row starts from the first pair not yet covered, and takes per factor the value with most new pairs.
    `allowed` also gets partial rows, and must judge them by the factors they have.
    """
    names = list(factors)
    left = _all_pairs(factors, names, allowed)
    rows: list[Row] = []
    while left:
        first = next(iter(left))
        indices = _fill(factors, names, allowed, left, first)
        if indices is None:  # no allowed row holds this pair
            del left[first]
            continue
        for pair in _pairs_of(names, indices):
            left.pop(pair, None)
        rows.append({name: factors[name][indices[name]] for name in names})
    return rows


def covering_rows(
    rows: Sequence[Row], counts: Callable[[str, str], bool], cost: Callable[[Row], float] = lambda row: 1.0
) -> list[bool]:
    """Return a flag per row: True in a small subset that has every value, and every pair of values that counts.

    Greedy: the next row is the one that adds the most missing values and pairs for its cost.

    Args:
        counts: True if the pairs of values of these two factors have to be in the subset.
    """
    aims = [_aims_of(row, counts) for row in rows]
    left = set().union(*aims)
    chosen: set[int] = set()
    while left:
        best = max(range(len(rows)), key=lambda number: (len(aims[number] & left) / cost(rows[number]), -number))
        chosen.add(best)
        left -= aims[best]
    return [number in chosen for number in range(len(rows))]


def _aims_of(row: Row, counts: Callable[[str, str], bool]) -> set[tuple[Any, ...]]:
    return {*row.items(), *((a, b) for a, b in combinations(row.items(), 2) if counts(a[0], b[0]))}


def _all_pairs(
    factors: Mapping[str, Sequence[Any]], names: list[str], allowed: Callable[[Row], bool]
) -> dict[Pair, None]:
    """Return the ordered set of pairs to cover."""
    pairs: dict[Pair, None] = {}
    for a, b in combinations(names, 2):
        for i, x in enumerate(factors[a]):
            for j, y in enumerate(factors[b]):
                if allowed({a: x, b: y}):
                    pairs[(a, i, b, j)] = None
    return pairs


def _fill(
    factors: Mapping[str, Sequence[Any]],
    names: list[str],
    allowed: Callable[[Row], bool],
    left: Mapping[Pair, None],
    first: Pair,
) -> dict[str, int] | None:
    """Return an allowed row with the pair `first`, or None if there is none. Backtracks only if a rule requires it."""
    chosen = {first[0]: first[1], first[2]: first[3]}
    rest = [name for name in names if name not in chosen]

    def gain(name: str, index: int, row: dict[str, int]) -> int:
        return sum(_pair(names, name, index, other, at) in left for other, at in row.items())

    def extend(position: int, row: dict[str, int]) -> dict[str, int] | None:
        if position == len(rest):
            return row
        name = rest[position]
        # Ties are broken by a hash, so that unconstrained values are spread over the rows, factor by factor.
        order = sorted(range(len(factors[name])), key=lambda i: (-gain(name, i, row), _shuffle(name, i, len(left))))
        for index in order:
            longer = {**row, name: index}
            if allowed({n: factors[n][i] for n, i in longer.items()}):
                done = extend(position + 1, longer)
                if done is not None:
                    return done
        return None

    return extend(0, chosen)


def _shuffle(name: str, index: int, turn: int) -> int:
    return zlib.crc32(f"{name} {index} {turn}".encode())


def _pair(names: list[str], a: str, i: int, b: str, j: int) -> Pair:
    return (a, i, b, j) if names.index(a) < names.index(b) else (b, j, a, i)


def _pairs_of(names: list[str], row: Mapping[str, int]) -> list[Pair]:
    return [(a, row[a], b, row[b]) for a, b in combinations(names, 2)]
