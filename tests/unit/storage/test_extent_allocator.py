"""Tests of the placement of extents: disjoint, in whole pages, and first in freed space."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from windlass.storage.extent_allocator import PAGE, ExtentAllocator, page_down, page_up, split_at_pages


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=30))
def test_extents_never_overlap_and_freed_space_is_reused(steps: list[tuple[int, int]]) -> None:
    space, taken = ExtentAllocator(), list[tuple[int, int]]()
    for size, which in steps:
        if size == 0 and taken:
            first, last = taken.pop(which % len(taken))
            space.free(first, last - first)
        else:
            where = space.find_free(size)
            assert space.allocate(size) == where
            assert all(where + size <= first or last <= where for first, last in taken)
            if size:
                taken.append((where, where + size))
        assert space.end == max((last for _, last in taken), default=0)
    gaps = sorted(taken)
    widest = max((b[0] - a[1] for a, b in zip([(0, 0), *gaps], gaps, strict=False)), default=0)
    if widest:
        assert space.find_free(widest) < space.end


@given(st.integers(0, 5 * PAGE), st.integers(1, 3 * PAGE))
def test_parts_of_pages_and_whole_pages_make_up_the_span(first: int, nbytes: int) -> None:
    last = first + nbytes
    parts, (low, high) = split_at_pages(first, last)
    pieces = sorted([*parts, (low, high)])
    assert sum(b - a for a, b in pieces) == nbytes
    assert low == high or (low % PAGE == 0 and high % PAGE == 0)
    for a, b in parts:
        assert first <= a < b <= last
        assert page_up(b) - page_down(a) == PAGE
        assert b - a < PAGE
