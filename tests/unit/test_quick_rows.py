"""Tests of the rows that `make test` keeps of a product over transports and stages."""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.dist.quick_rows import quick_rows, share

SIZES = st.fixed_dictionaries(
    {"transport": st.integers(1, 2), "stage": st.integers(1, 4)}, optional={"model": st.integers(1, 7)}
)


def all_rows(sizes: dict[str, int]) -> list[dict[str, Any]]:
    names = list(sizes)
    return [dict(zip(names, values, strict=True)) for values in product(*(range(size) for size in sizes.values()))]


@given(SIZES, st.data())
def test_every_value_of_every_parameter_stays(sizes: dict[str, int], data: st.DataObject) -> None:
    """Each value of each parameter is in a quick row, for any rows of a test."""
    rows = data.draw(st.lists(st.sampled_from(all_rows(sizes)), min_size=1, unique_by=str))
    kept = [row for row, quick in zip(rows, quick_rows(rows), strict=True) if quick]
    for name in sizes:
        assert {row[name] for row in kept} == {row[name] for row in rows}


@given(st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_neighbouring_shares_are_the_whole_list(length: int, shares: int, shifted: bool) -> None:
    cases = list(range(length))
    results = [item for number in range(shares) for item in share(cases, number + shifted, shares, False)]
    assert sorted(results) == cases == share(cases, 0, shares, True)


def test_one_row_of_the_other_parameters_keeps_both_transports_at_the_highest_stage() -> None:
    rows = [{"stage": stage, "transport": transport} for stage in range(4) for transport in ("shm", "gloo")]
    kept = [row for row, quick in zip(rows, quick_rows(rows), strict=True) if quick]
    assert [row["stage"] for row in kept] == [0, 1, 2, 3, 3]
    assert {row["transport"] for row in kept if row["stage"] == 3} == {"shm", "gloo"}


def test_many_rows_run_at_two_stages_on_one_transport_each() -> None:
    rows = all_rows({"model": 30, "stage": 4, "transport": 2})
    kept = [row for row, quick in zip(rows, quick_rows(rows), strict=True) if quick]
    assert len(kept) == 60
    assert {(row["stage"], row["transport"]) for row in kept} == set(product(range(4), range(2)))


def test_rows_without_transport_and_stage_stay() -> None:
    assert quick_rows([{"model": number} for number in range(5)]) == 5 * [True]
