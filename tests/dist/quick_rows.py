"""Choice of the parametrized rows of a test that `make test` runs. `make parity` runs all rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest

Row = Mapping[str, Hashable]


def quick_rows(rows: Iterable[Row]) -> list[bool]:
    """Return a flag per row of a test, True for a quick row.

    Every value of every parameter is in a quick row, but not every combination of values. Among rows that add equally
    many new values, two of three choices prefer the highest stage, and transports alternate. A test with no parameters
    but transport and stage keeps all its stages, and its highest (or only) stage keeps all transports.

    Args:
        rows: parameters by name. Values that belong together are one parameter.
    """
    rows = list(rows)
    others = {tuple((k, v) for k, v in row.items() if k not in ("transport", "stage")) for row in rows}
    kept = _stages(rows) if len(others) == 1 else []
    left = {item for row in rows for item in row.items()} - {item for at in kept for item in rows[at].items()}
    *lower, highest = _distinct(row.get("stage") for row in rows)
    used: Counter[tuple[str, Hashable]] = Counter()
    while left:
        turn = len(kept)
        wanted = lower[turn // 3 % len(lower)] if lower and turn % 3 == 2 else highest
        worth = [
            (len(left & row.items()), row.get("stage") == wanted, -sum(used[item] for item in row.items()))
            for row in rows
        ]
        best = worth.index(max(worth))
        kept.append(best)
        left -= rows[best].items()
        used.update(item for item in rows[best].items() if item[0] != "stage")
    return [at in kept for at in range(len(rows))]


def _stages(rows: Sequence[Row]) -> list[int]:
    """Return indices of one row per stage, with alternating transports, and of all rows of the highest stage."""
    stages = _distinct(row.get("stage") for row in rows)
    kept: list[int] = []
    for turn, stage in enumerate(stages):
        there = [at for at, row in enumerate(rows) if row.get("stage") == stage]
        kept += there if stage == stages[-1] else [there[turn % len(there)]]
    return kept


# Parameter of tests that run a list of cases in one process group: in `make test` each row takes a share of the list.
in_shares = pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["share", "every"]
)


def share(cases: Sequence[Any], number: int, shares: int, every: bool) -> list[Any]:
    """Return the share of row `number` in a list of cases, or the whole list if `every`.

    The shares of `shares` consecutive numbers together are the whole list.
    """
    return list(cases) if every else list(cases[number % shares :: shares])


def mark_slow_rows(items: list[pytest.Item]) -> None:
    """Mark as slow the rows of each collected test that are not quick."""
    by_test: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for rows in by_test.values():
        parameters = [_parameters_of(item) for item in rows]
        for item, quick in zip(rows, quick_rows(parameters), strict=True):
            if not quick:
                item.add_marker(pytest.mark.slow)


def _parameters_of(item: pytest.Function) -> dict[str, Hashable]:
    """Return the parameters of a collected test. Names of one `parametrize` make one parameter."""
    values = {name: _key(value) for name, value in item.callspec.params.items()}
    result = {name: values.pop(name) for name in ("stage", "transport") if name in values}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
        if together := [name for name in names if name in values]:
            result[",".join(together)] = tuple(values.pop(name) for name in together)
    return {**result, **values}


def _key(value: Any) -> Hashable:
    """Return the value, or its id if it has no hash: rows with the same value share one object."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _distinct(values: Iterable[Hashable]) -> list[Hashable]:
    return sorted(set(values), key=str)
