"""Choice of the rows that `make test` runs of a test over transports and stages. `make parity` runs them all."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest


def quick_rows(rows: Iterable[Mapping[str, Hashable]]) -> list[bool]:
    """Return for each row of a test whether it is quick.

    A row of the other parameters runs at the highest stage and at one other, in turn, and each of these on one
    transport, in turn. Every value of every parameter is in a quick row. A test without other parameters keeps all its
    stages, and the highest one, or the only one, keeps all its transports.

    Args:
        rows: parameters by name; those named `transport` and `stage` are thinned out.
    """
    rows = list(rows)
    others = _numbers(tuple((k, v) for k, v in row.items() if k not in ("transport", "stage")) for row in rows)
    cells = [(other, row.get("stage"), row.get("transport")) for other, row in zip(others, rows, strict=True)]
    places = {stage: place for place, stage in enumerate(_distinct(stage for _, stage, _ in cells))}
    alone = len(set(others)) == 1
    quick: set[tuple[int, Hashable, Hashable]] = set()
    for other in set(others):
        *lower, highest = _distinct(stage for number, stage, _ in cells if number == other)
        share = min(len(lower), len(set(others))) or 1
        for stage in (*(item for j, item in enumerate(lower) if j % share == other % share), highest):
            there = _distinct(transport for *cell, transport in cells if cell == [other, stage])
            all_kept = alone and stage == highest
            quick |= {(other, stage, t) for t in (there if all_kept else [there[(other + places[stage]) % len(there)]])}
    for axis in (1, 2):  # where stages or transports differ from row to row, one of them may be in no row so far
        for value in _distinct(cell[axis] for cell in cells):
            if all(cell[axis] != value for cell in quick):
                quick.add(next(cell for cell in cells if cell[axis] == value))
    return [cell in quick for cell in cells]


# For tests that run a list of cases in one world of ranks: in `make test` each row takes its share of the list.
in_shares = pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["share", "every"]
)


def share(cases: Sequence[Any], number: int, shares: int, every: bool) -> list[Any]:
    """Return the share of row `number` in a list of cases, or all of it if `every`.

    The shares of `shares` neighbouring rows are the whole list.
    """
    return list(cases) if every else list(cases[number % shares :: shares])


def mark_slow_rows(items: list[pytest.Item]) -> None:
    """Mark the rows of each collected test that are not quick as slow."""
    by_test: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for rows in by_test.values():
        parameters = [{name: _key(value) for name, value in item.callspec.params.items()} for item in rows]
        for item, quick in zip(rows, quick_rows(parameters), strict=True):
            if not quick:
                item.add_marker(pytest.mark.slow)


def _key(value: Any) -> Hashable:
    """Return the value, or a stand-in for one that has no hash: rows of one list share the object."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _distinct(values: Iterable[Hashable]) -> list[Hashable]:
    return sorted(set(values), key=str)


def _numbers(values: Iterable[Hashable]) -> list[int]:
    """Number values by their first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]
