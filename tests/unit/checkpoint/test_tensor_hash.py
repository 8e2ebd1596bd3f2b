"""Tests of the hash of named tensors: equal for any sharding and order, different after any change."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.base.errors import CheckpointError
from windlass.checkpoint.tensor_hash import TensorHash, fingerprint_digest

FLOATING = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*FLOATING, torch.int64, torch.int32, torch.uint8, torch.bool]


def values(numel: int, dtype: torch.dtype) -> torch.Tensor:
    result = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 3
    return (result > 0) if dtype == torch.bool else result.to(dtype)


def hashed(flat: torch.Tensor, name: str = "w", shape: tuple[int, ...] = (), start: int = 0) -> int:
    result = TensorHash()
    result.add(name, shape or (flat.numel(),), start, flat)
    return result.value()


@given(st.integers(1, 20_000), st.integers(1, 6), st.sampled_from(DTYPES), st.randoms(use_true_random=False))
def test_hash_is_additive_over_any_partition_and_order(
    numel: int, parts: int, dtype: torch.dtype, order: random.Random
) -> None:
    flat = values(numel, dtype)
    ends = sorted(order.randint(0, numel) for _ in range(parts - 1))
    spans = list(zip([0, *ends], [*ends, numel], strict=True))
    order.shuffle(spans)
    sums = [hashed(flat[start:stop], shape=(numel,), start=start) for start, stop in spans]
    assert fingerprint_digest(sums) == fingerprint_digest([hashed(flat)])


@given(st.integers(1, 10_000), st.integers(0, 1 << 60), st.sampled_from(DTYPES[:-1]))
def test_hash_changes_with_one_bit(numel: int, which: int, dtype: torch.dtype) -> None:
    flat = values(numel, dtype)
    raw = flat.clone().view(torch.uint8)
    bit = which % (8 * raw.numel())
    raw[bit // 8] ^= 1 << bit % 8
    assert hashed(raw.view(dtype)) != hashed(flat)


def test_hash_depends_on_names_shapes_and_dtypes() -> None:
    flat = values(12, torch.float32)
    same = {hashed(flat), hashed(flat, "v"), hashed(flat, shape=(3, 4)), hashed(flat.view(torch.int32))}
    assert len(same) == 4


def test_hash_changes_with_permuted_elements() -> None:
    flat = values(9000, torch.float32)
    rolled = [hashed(flat.roll(by)) for by in (1, 4096, 8192)]
    assert len({*rolled, hashed(flat), hashed(flat.flip(0))}) == 5


def test_hash_is_stable_over_releases() -> None:
    result = TensorHash()
    result.add("param/w", (5000,), 0, torch.arange(5000, dtype=torch.float32))
    result.add_plain("state/w/step", 3.0)
    assert fingerprint_digest([result.value()]) == "2c237f1173aef4cc"


def test_hashing_does_not_change_the_tensor() -> None:
    flat = values(5000, torch.int64)
    before = flat.clone()
    hashed(flat)
    assert torch.equal(flat, before)


def test_unsupported_dtype_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="'w' has elements of torch.complex128"):
        hashed(torch.zeros(2, dtype=torch.complex128))
