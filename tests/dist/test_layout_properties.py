"""Tests of layout arithmetic at up to 1,024 ranks in one process: for any shapes, no element is lost or misplaced."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.zero.core.unit_layout import ALIGN, layout_of
from windlass.zero.core.unit_layout import UnitLayout as Layout

RANKS = st.integers(1, 1024)
NUMELS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 5000), st.integers(0, 10**9)), min_size=0, max_size=24)


def divisor(ranks: int, choice: int) -> int:
    """Return a divisor of `ranks`."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return divisors[choice % len(divisors)]


@given(NUMELS, RANKS)
def test_parameters_are_in_order_without_overlap(numels: list[int], ranks: int) -> None:
    layout = Layout(tuple(numels), ranks)
    end = 0
    for offset, numel in zip(layout.offsets, numels, strict=True):
        assert offset >= end
        end = offset + numel
    assert end <= layout.padded
    assert layout.numel == sum(numels)


@given(NUMELS, RANKS)
def test_padding_is_bounded(numels: list[int], ranks: int) -> None:
    """Padding is less than a cache line for each parameter and a cache line for each rank."""
    layout = Layout(tuple(numels), ranks)
    line = ALIGN
    assert layout.padded % (ranks * line) == 0
    assert layout.padded - layout.numel < line * (len(numels) + ranks)


@given(NUMELS, RANKS, st.integers(0, 100))
def test_shards_tile_the_buffer(numels: list[int], ranks: int, choice: int) -> None:
    layout = Layout(tuple(numels), ranks)
    count = divisor(ranks, choice)
    end = 0
    for index in range(count):
        start, stop = layout.shard_range(index, count)
        assert start == end and stop - start == layout.padded // count
        end = stop
    assert end == layout.padded


@given(NUMELS, RANKS.filter(lambda n: n > 1), st.integers(2, 1024))
def test_indivisible_count_is_refused(numels: list[int], ranks: int, count: int) -> None:
    layout = Layout(tuple(numels), ranks)
    if ranks % count:
        with pytest.raises(ValueError, match=str(count)):
            layout.shard_range(0, count)


@settings(deadline=None)
@given(NUMELS, RANKS, st.integers(0, 100))
def test_fragments_of_all_shards_cover_every_element_once(numels: list[int], ranks: int, choice: int) -> None:
    layout = Layout(tuple(numels), ranks)
    count = divisor(ranks, choice)
    covered: dict[int, int] = defaultdict(int)
    for index in range(count):
        start, stop = layout.shard_range(index, count)
        for piece in layout.pieces(start, stop):
            assert piece.numel > 0
            assert piece.start == covered[piece.index], "pieces of a parameter follow one another"
            assert start + piece.offset == layout.offsets[piece.index] + piece.start
            assert piece.offset + piece.numel <= stop - start
            covered[piece.index] = piece.stop
    assert [covered[i] for i in range(len(numels))] == numels


@settings(deadline=None)
@given(NUMELS, RANKS, st.floats(0, 1), st.floats(0, 1))
def test_fragments_and_gaps_tile_any_span(numels: list[int], ranks: int, a: float, b: float) -> None:
    layout = Layout(tuple(numels), ranks)
    start, stop = sorted((int(a * layout.padded), int(b * layout.padded)))
    parts = [(start + p.offset, start + p.offset + p.numel) for p in layout.pieces(start, stop)]
    parts += list(layout.gaps(start, stop))
    end = start
    for first, last in sorted(parts):
        assert first == end and last > first
        end = last
    assert end == stop


@given(st.lists(st.lists(st.integers(0, 50), max_size=4), max_size=8), RANKS)
def test_shapes_become_numels(shapes: list[list[int]], ranks: int) -> None:
    layout = layout_of(shapes, ranks)
    for shape, numel in zip(shapes, layout.numels, strict=True):
        product = 1
        for size in shape:
            product *= size
        assert numel == product
