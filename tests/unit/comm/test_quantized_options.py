"""Tests of `ranks_of_host`: how many ranks of a group are on one host."""

from __future__ import annotations

import pytest

from windlass.comm.quantized_options import ranks_of_host


@pytest.mark.parametrize(
    ("ranks", "count"), [((0, 1, 2, 3), 4), ((0, 2, 4, 6), 2), ((1, 3, 5, 7), 2), ((4, 5), 2), ((3, 7), 1), ((6,), 1)]
)
def test_ranks_of_a_group_on_a_host_of_four(ranks: tuple[int, ...], count: int) -> None:
    assert ranks_of_host(ranks, 4) == count
