"""Laws of the model of malloc's heap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.plan.heap_model import BLOCK_ENDED, HeapModel

MIB = 1 << 20
_OVERHEAD = 96 + 32  # maximum number of bytes that the heap adds to a block


@given(st.lists(st.integers(1, 4 * MIB), max_size=40))
def test_blocks_that_stay_lie_side_by_side(sizes: list[int]) -> None:
    heap = HeapModel()
    for number, nbytes in enumerate(sizes, 1):
        heap.allocate(number, nbytes)
    assert sum(sizes) <= heap.extent <= sum(sizes) + _OVERHEAD * len(sizes)


@given(st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0, 64, 4096, MIB, 3 * MIB])), max_size=60))
def test_a_heap_holds_what_is_alive(entries: list[tuple[int, int]]) -> None:
    log, alive, peak = [], dict[int, int](), 0
    for number, nbytes in entries:
        if nbytes and number not in alive:
            alive[number] = nbytes
        elif not nbytes and number in alive:
            del alive[number]
        else:
            continue
        log.append((number, nbytes))
        peak = max(peak, sum(alive.values()))
    heap = HeapModel()
    for _ in range(3):
        before = heap.extent
        heap.run(log)
        assert heap.extent >= max(before, peak)


def test_a_hole_is_too_small_for_the_next_block_of_its_size_until_the_module_ends() -> None:
    first, second, third = (1, MIB), (2, MIB), (3, MIB)
    within, after = HeapModel(), HeapModel()
    within.run([first, second, (1, 0), third])
    assert within.extent > 3 * MIB
    # The remainders of 30 later blocks fill malloc's cache (21), so the remainder next to the hole is merged into it.
    small = [(number, 64) for number in range(10, 40)]
    after.run([first, second, *small, BLOCK_ENDED, BLOCK_ENDED, (1, 0), third])
    assert after.extent < 3 * MIB


@pytest.mark.parametrize("iterations", [300, 3000])
def test_a_loop_inside_a_module_reuses_its_memory(iterations: int) -> None:
    """Each iteration replaces the block of the iteration before, as in the backward of a scan over time."""
    log = [(1, MIB)]
    for number in range(2, iterations):
        log += [(number, MIB), (number - 1, 0)]
    heap = HeapModel()
    heap.run(log)
    assert heap.extent < 64 * MIB
