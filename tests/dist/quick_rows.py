"""Choice of the parametrized rows of a test that `make test` runs. `make parity` runs all rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest

Row = Mapping[str, Hashable]


def quick_rows(tests: Sequence[Sequence[Row]]) -> list[list[bool]]:
    """Return a flag per row of each test of a file, True for a quick row.

    Every value of every parameter is in a quick row of the file, but not every combination of values: tests that share
    a parameter share its values. Each test has a quick row, and if it has several stages, one at the highest stage and
    one at a lower one. Among rows that add equally many new values, two of three choices prefer the highest stage,
    transports alternate, and few ranks are preferred.

    Args:
        tests: the rows of each test, as parameters by name. Values that belong together are one parameter.
    """
    rows = [(at, row) for at, of_test in enumerate(tests) for row in of_test]
    left = {item for _, row in rows for item in row.items()}
    kept: set[int] = set()
    used: Counter[tuple[str, Hashable]] = Counter()
    *lower, highest = _distinct(row["stage"] for _, row in rows if "stage" in row) or [None]

    def keep_one_of(candidates: Iterable[int]) -> None:
        turn = len(kept)
        wanted = lower[turn // 3 % len(lower)] if lower and turn % 3 == 2 else highest

        def worth(number: int) -> tuple[int, bool, int, int]:
            row = rows[number][1]
            new = len(left & row.items())
            return new, row.get("stage") == wanted, -sum(used[item] for item in row.items()), -_ranks_of(row)

        best = max(candidates, key=worth)
        kept.add(best)
        left.difference_update(rows[best][1].items())
        used.update(item for item in rows[best][1].items() if item[0] != "stage")

    for at in sorted(range(len(tests)), key=lambda at: len(tests[at])):
        own = [number for number, (of, _) in enumerate(rows) if of == at]
        at_highest = [number for number in own if rows[number][1].get("stage") == highest]
        at_lower = [number for number in own if number not in at_highest]
        for candidates in filter(None, (at_highest, at_lower)):
            keep_one_of(candidates)
    while left:
        keep_one_of(range(len(rows)))
    flags = iter(number in kept for number in range(len(rows)))
    return [[next(flags) for _ in of_test] for of_test in tests]


def _ranks_of(row: Row) -> int:
    ranks = row.get("ranks")
    return ranks if isinstance(ranks, int) else 0


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
    """Mark as slow the rows of each file of collected tests that are not quick."""
    files: dict[str, dict[str, list[pytest.Function]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            file, test = item.nodeid.partition("[")[0].split("::", 1)
            files.setdefault(file, {}).setdefault(test, []).append(item)
    for tests in files.values():
        flags = quick_rows([[_parameters_of(item) for item in rows] for rows in tests.values()])
        for rows, quick_of_rows in zip(tests.values(), flags, strict=True):
            for item, quick in zip(rows, quick_of_rows, strict=True):
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
