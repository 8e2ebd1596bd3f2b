"""Tests of sums of keyed words: native code equals the reference, and both equal the value of earlier releases."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.kernels import keyed_sum, reference
from windlass.kernels.kernel_dispatch import list_kernel_paths

WORDS = [torch.int8, torch.int16, torch.int32, torch.int64]


def words(count: int, dtype: torch.dtype) -> torch.Tensor:
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, (count,), dtype=dtype, generator=torch.Generator().manual_seed(count))


@given(
    st.integers(0, 20_000),
    st.sampled_from([0, 1, 4095, 4096, 70_000, (1 << 40) + 5]),
    st.sampled_from(WORDS),
    st.integers(-(1 << 63), (1 << 63) - 1),
)
def test_native_sum_equals_the_reference(count: int, start: int, dtype: torch.dtype, seed: int) -> None:
    given_words = words(count, dtype)
    assert int(keyed_sum(given_words, start, seed)) == int(reference.keyed_sum(given_words, start, seed))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_number_of_threads_does_not_change_the_sum(threads: int) -> None:
    before = torch.get_num_threads()
    given_words = words(3_000_001, torch.int16)
    try:
        torch.set_num_threads(threads)
        assert int(keyed_sum(given_words, 17, 3)) == int(reference.keyed_sum(given_words, 17, 3))
    finally:
        torch.set_num_threads(before)


def test_non_contiguous_words_are_summed() -> None:
    spread = words(2000, torch.int32)[::2]
    assert int(keyed_sum(spread, 0, 1)) == int(keyed_sum(spread.contiguous(), 0, 1))


def test_sum_is_stable_over_releases() -> None:
    """The value is constant, because checkpoints store it."""
    assert int(reference.keyed_sum(torch.arange(-3, 9000, dtype=torch.int32), 5, 7)) == GOLDEN


def test_native_sum_exists_wherever_native_updates_do() -> None:
    assert (importlib.util.find_spec("windlass.kernels._hashes") is not None) == (len(list_kernel_paths()) > 1)


GOLDEN = -4327214012511853994
