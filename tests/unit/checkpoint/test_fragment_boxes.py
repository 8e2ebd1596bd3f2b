"""Laws of the arithmetic that splits a flat range of a row-major tensor into boxes."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.checkpoint.fragment_boxes import FlatBox, boxes_of_range, flat_start, is_contiguous

Range = tuple[tuple[int, ...], int, int]


@st.composite
def ranges(draw: st.DrawFn) -> Range:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=5)))
    ends = st.integers(0, math.prod(shape))
    start, stop = sorted((draw(ends), draw(ends)))
    return shape, start, stop


def elements(shape: tuple[int, ...], box: FlatBox) -> list[int]:
    """Return the flat positions of a box's elements in row-major order, by enumeration."""
    spans = [range(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True)]
    return [
        sum(at * math.prod(shape[dim + 1 :]) for dim, at in enumerate(index)) for index in itertools.product(*spans)
    ]


@given(ranges())
def test_boxes_are_the_range_in_order(case: Range) -> None:
    shape, start, stop = case
    cut = boxes_of_range(shape, start, stop)
    assert [position for box in cut for position in elements(shape, box)] == list(range(start, stop))
    assert all(box.start == flat_start(shape, box.offsets) for box in cut)
    assert all(is_contiguous(shape, box.sizes) and math.prod(box.sizes) > 0 for box in cut)


@given(ranges())
def test_range_has_at_most_2n_minus_1_boxes(case: Range) -> None:
    shape, start, stop = case
    longer_than_one = sum(size > 1 for size in shape)
    assert len(boxes_of_range(shape, start, stop)) <= max(1, 2 * longer_than_one - 1)


@given(st.lists(st.integers(3, 5), min_size=1, max_size=4))
def test_box_count_bound_is_tight(sizes: list[int]) -> None:
    shape = tuple(sizes)
    assert len(boxes_of_range(shape, 1, math.prod(shape) - 1)) == 2 * len(shape) - 1


@given(ranges(), st.integers(1, 8))
def test_shards_of_all_ranks_partition_the_tensor(case: Range, ranks: int) -> None:
    shape, _, _ = case
    numel = math.prod(shape)
    cuts = [numel * rank // ranks for rank in range(ranks + 1)]
    parts = [box for start, stop in itertools.pairwise(cuts) for box in boxes_of_range(shape, start, stop)]
    assert [position for box in parts for position in elements(shape, box)] == list(range(numel))


def test_full_tensor_is_one_box() -> None:
    for shape in [(), (1,), (1, 1), (7,), (3, 4), (2, 1, 5)]:
        assert boxes_of_range(shape, 0, math.prod(shape)) == [FlatBox((0,) * len(shape), shape, 0)]


def test_empty_range_or_tensor_has_no_boxes() -> None:
    assert (
        boxes_of_range((), 0, 0)
        == boxes_of_range((4, 2), 3, 3)
        == boxes_of_range((0,), 0, 0)
        == boxes_of_range((3, 0, 2), 0, 0)
        == []
    )


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_the_tensor_is_an_error(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        boxes_of_range((2, 3), start, stop)


@given(st.lists(st.tuples(st.integers(1, 4), st.data()), min_size=0, max_size=4))
def test_is_contiguous_equals_counting(dims: list[tuple[int, st.DataObject]]) -> None:
    shape = tuple(size for size, _ in dims)
    sizes = tuple(data.draw(st.integers(1, size)) for size, data in dims)
    positions = elements(shape, FlatBox((0,) * len(shape), sizes, 0))
    assert is_contiguous(shape, sizes) == (positions == list(range(len(positions))))
