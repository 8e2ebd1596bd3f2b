"""Tests of the rows that `make test` keeps of a product over transports and stages."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.dist.quick_rows import quick_rows, share
from tests.pairwise import covering_rows, pairwise

SIZES = st.fixed_dictionaries(
    {"transport": st.integers(1, 2), "stage": st.integers(1, 4)}, optional={"model": st.integers(1, 7)}
)


def all_rows(sizes: dict[str, int]) -> list[dict[str, Any]]:
    names = list(sizes)
    return [dict(zip(names, values, strict=True)) for values in product(*(range(size) for size in sizes.values()))]


@given(SIZES, st.data())
def test_every_value_of_every_parameter_stays(sizes: dict[str, int], data: st.DataObject) -> None:
    """Whatever rows a test has, each value of each parameter is in a row that `make test` keeps."""
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


def test_many_rows_run_at_one_stage_on_one_transport_each() -> None:
    rows = all_rows({"model": 30, "stage": 4, "transport": 2})
    kept = [row for row, quick in zip(rows, quick_rows(rows), strict=True) if quick]
    assert len(kept) == 30
    assert {row["model"] for row in kept} == set(range(30))
    assert all(sum(row["transport"] == transport for row in kept) == 15 for transport in range(2))
    assert 16 <= sum(row["stage"] == 3 for row in kept) <= 20


def test_a_product_runs_as_many_rows_as_its_longest_parameter() -> None:
    rows = all_rows({"model": 6, "precision": 2, "ranks": 3})
    kept = [row for row, quick in zip(rows, quick_rows(rows), strict=True) if quick]
    assert len(kept) == 6
    assert all(sum(row["precision"] == precision for row in kept) == 3 for precision in range(2))


def test_rows_without_transport_and_stage_stay() -> None:
    assert quick_rows([{"model": number} for number in range(5)]) == 5 * [True]


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(0, 4))
def test_covering_rows_have_every_value_and_the_pairs_that_count(sizes: list[int], alone: int) -> None:
    rows = pairwise({str(number): range(size) for number, size in enumerate(sizes)})

    def counts(a: str, b: str) -> bool:
        return str(alone) not in (a, b)

    def aims(found: list[dict[str, Any]]) -> set[Any]:
        pairs = {pair for row in found for pair in combinations(row.items(), 2) if counts(pair[0][0], pair[1][0])}
        return pairs | {item for row in found for item in row.items()}

    kept = [row for row, quick in zip(rows, covering_rows(rows, counts), strict=True) if quick]
    assert aims(kept) == aims(rows)
