"""Tests that byte ranges behave like a set of positions: every operation equals that of a Python set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from windlass.storage.byte_ranges import ByteRanges

_POSITIONS = st.integers(0, 24)
_OPERATIONS = st.lists(st.tuples(st.booleans(), _POSITIONS, _POSITIONS), max_size=12)


@given(_OPERATIONS, _POSITIONS, _POSITIONS)
def test_spans_equal_a_set(operations: list[tuple[bool, int, int]], first: int, last: int) -> None:
    spans, model = ByteRanges(), set[int]()
    for adds, low, high in operations:
        (spans.add if adds else spans.remove)(low, high)
        model = model | set(range(low, high)) if adds else model - set(range(low, high))
    assert {at for at in range(25) if spans.overlaps(at, at + 1)} == model
    requested = set(range(first, last))
    assert spans.overlaps(first, last) == bool(requested & model)
    gap = spans.first_gap(first, last)
    assert (gap is None) == (requested <= model)
    if gap is not None:
        missing = set(range(*gap))
        assert missing and missing <= requested - model
        assert min(missing) == min(requested - model)
        assert gap[1] == last or gap[1] in model
