"""Places of tokens: every one is somewhere once, and ranks have as much as each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.parallel.sequence.cut import Pattern, cut_of_sizes, joined, tokens_of, within


@st.composite
def patterns(draw: st.DrawFn) -> tuple[Pattern, int]:
    ulysses, ring = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    ranks = ulysses * ring
    return Pattern(ranks, ulysses, draw(st.booleans())), draw(st.integers(ranks, 5 * ranks + 7))


@given(patterns())
def test_every_token_is_somewhere_once_and_every_rank_has_some(case: tuple[Pattern, int]) -> None:
    pattern, length = case
    cut = pattern.cut(length)
    tokens = [token for ranges in cut.ranges for start, stop in ranges for token in range(start, stop)]
    assert sorted(tokens) == list(range(length))
    assert cut.length == length and min(cut.sizes) >= 1
    assert max(cut.sizes) - min(cut.sizes) <= 2  # a part from either end may be one longer


@given(patterns())
def test_taking_parts_and_restoring_them_is_nothing(case: tuple[Pattern, int]) -> None:
    pattern, length = case
    cut = pattern.cut(length)
    whole = torch.arange(2 * length).view(2, length)
    parts = [cut.take(whole, rank) for rank in range(pattern.ranks)]
    assert [part.shape[1] for part in parts] == cut.sizes
    assert torch.equal(cut.restore(torch.cat(parts, dim=1)), whole)


@given(patterns())
def test_a_group_holds_the_tokens_of_its_ranks_in_their_order(case: tuple[Pattern, int]) -> None:
    pattern, length = case
    cut = pattern.cut(length)
    for group in range(cut.ring):
        held = [t for start, stop in cut.of_group(group) for t in range(start, stop)]
        of_ranks = [t for rank in cut.members(group) for a, b in cut.ranges[rank] for t in range(a, b)]
        assert held == of_ranks


def test_a_balanced_causal_ring_of_1024_ranks_sees_as_much_everywhere() -> None:
    pattern = Pattern(1024, 8, balanced=True)
    cut = pattern.cut(2**20)
    pairs = [
        sum(stop * (stop + 1) // 2 - start * (start + 1) // 2 for start, stop in cut.of_group(g)) for g in range(128)
    ]
    assert max(pairs) - min(pairs) < 2e-3 * max(pairs)
    even = Pattern(1024, 8).cut(2**20)
    last, first = (even.of_group(g)[0] for g in (127, 0))
    assert last[1] ** 2 - last[0] ** 2 > 200 * first[1] ** 2  # what balance is for


def test_parts_of_given_sizes_lie_one_after_the_other() -> None:
    cut = cut_of_sizes([3, 1, 4], 1)
    assert cut.ranges == (((0, 3),), ((3, 4),), ((4, 8),))
    assert cut.in_order and cut.sizes == [3, 1, 4]


@pytest.mark.parametrize(
    ("ranges", "part", "wanted"),
    [
        (((0, 3), (5, 9)), (2, 5), ((2, 3), (5, 7))),
        (((0, 3), (5, 9)), (0, 7), ((0, 3), (5, 9))),
        (((4, 6),), (1, 1), ((0, 0),)),
    ],
)
def test_a_part_of_ranges(ranges: tuple, part: tuple, wanted: tuple) -> None:
    assert within(ranges, part) == wanted


def test_ranges_that_meet_are_one() -> None:
    assert joined([(0, 2), (2, 5), (7, 7), (7, 9)]) == ((0, 5), (7, 9))
    assert joined([]) == ((0, 0),) and tokens_of(joined([])) == 0
