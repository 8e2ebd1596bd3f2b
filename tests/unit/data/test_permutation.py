"""Tests that a permutation is a bijection, depends on seed and epoch, and never changes between releases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.data.resumable_samplers import Permutation


@given(length=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_permutation_is_a_bijection(length: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(length, seed, epoch)(np.arange(length))) == list(range(length))


@given(length=st.integers(2**40, 2**60), positions=st.lists(st.integers(0, 2**40 - 1), min_size=1, unique=True))
def test_huge_range_is_permuted_without_collisions(length: int, positions: list[int]) -> None:
    values = Permutation(length, 7, 3)(np.array(positions))
    assert len(set(values.tolist())) == len(positions)
    assert values.min() >= 0 and values.max() < length


def test_seed_and_epoch_change_the_order() -> None:
    orders = [Permutation(500, seed, epoch)(np.arange(500)) for seed in (0, 1) for epoch in (0, 1)]
    # Two random orders of 500 elements agree in about one place.
    assert all((a == b).sum() < 20 for i, a in enumerate(orders) for b in orders[:i])


def test_permutation_is_stable_over_releases() -> None:
    """Saved runs resume in this order: if this test fails, they would repeat or skip samples."""
    assert Permutation(10, 0, 0)(np.arange(10)).tolist() == [7, 5, 8, 1, 3, 0, 9, 6, 2, 4]


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Permutation(0, 0, 0)
