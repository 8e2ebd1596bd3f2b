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


def kept_of(*tests: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the rows of each test of a file that `make test` keeps."""
    flags = quick_rows(tests)
    return [
        [row for row, quick in zip(rows, found, strict=True) if quick] for rows, found in zip(tests, flags, strict=True)
    ]


@given(st.lists(SIZES, min_size=1, max_size=4), st.data())
def test_every_value_of_every_parameter_stays_in_a_file(sizes: list[dict[str, int]], data: st.DataObject) -> None:
    """Each test keeps a row, and two if it has several stages, with the highest; the file keeps each value."""
    tests = [data.draw(st.lists(st.sampled_from(all_rows(of)), min_size=1, unique_by=str)) for of in sizes]
    kept = kept_of(*tests)
    highest = max(row["stage"] for rows in tests for row in rows)
    for rows, of_test in zip(tests, kept, strict=True):
        stages, stay = ({row["stage"] for row in some} for some in (rows, of_test))
        assert len(stay) >= (2 if highest in stages and len(stages) > 1 else 1)
        assert (highest in stay) == (highest in stages)
    for name in {name for of in sizes for name in of}:
        assert {row[name] for rows in kept for row in rows if name in row} == {
            row[name] for rows in tests for row in rows if name in row
        }


@given(st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_neighbouring_shares_are_the_whole_list(length: int, shares: int, shifted: bool) -> None:
    cases = list(range(length))
    results = [item for number in range(shares) for item in share(cases, number + shifted, shares, False)]
    assert sorted(results) == cases == share(cases, 0, shares, True)


def test_tests_of_a_file_share_the_stages_and_transports() -> None:
    rows = [{"stage": stage, "transport": transport} for stage in range(4) for transport in ("shm", "gloo")]
    kept = kept_of(rows, rows, rows)
    assert [len(of_test) for of_test in kept] == [2, 2, 2]
    assert {row["stage"] for of_test in kept for row in of_test} == {0, 1, 2, 3}
    assert all({row["transport"] for row in of_test} == {"shm", "gloo"} for of_test in kept)
    (alone,) = kept_of(rows)
    assert {row["stage"] for row in alone} == {0, 1, 2, 3} and len(alone) == 4


def test_many_rows_run_at_one_stage_on_one_transport_each() -> None:
    rows = all_rows({"model": 30, "stage": 4, "transport": 2})
    (kept,) = kept_of(rows)
    assert len(kept) == 30
    assert {row["model"] for row in kept} == set(range(30))
    assert all(sum(row["transport"] == transport for row in kept) == 15 for transport in range(2))
    assert 16 <= sum(row["stage"] == 3 for row in kept) <= 20


def test_a_product_runs_as_many_rows_as_its_longest_parameter() -> None:
    rows = all_rows({"model": 6, "precision": 2, "ranks": 3})
    (kept,) = kept_of(rows)
    assert len(kept) == 6
    assert all(sum(row["precision"] == precision for row in kept) == 3 for precision in range(2))


def test_rows_without_transport_and_stage_stay() -> None:
    assert quick_rows([[{"model": number} for number in range(5)]]) == [5 * [True]]


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
