"""Tests of the sum of the ranks' parts: exact order, aliasing, 16-bit dtypes, and the sum of squares."""

from __future__ import annotations

import pytest
import torch

from windlass.comm.ordered_sum import CHUNK, ordered_sum, sum_of_squares


def parts_of(count: int, numel: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count * 1000 + numel)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("numel", [0, 1, 33, CHUNK + 5])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_ordered_sum_equals_addition_in_rank_order(count: int, numel: int, add: bool) -> None:
    parts = parts_of(count, numel)
    out = torch.ones(numel)
    expected = parts[0].clone()
    for part in parts[1:]:
        expected = expected + part
    expected = expected * 0.25 + (1 if add else 0)
    squares = ordered_sum(parts, out, add=add, factor=0.25, measure=True)
    assert torch.equal(out, expected)
    assert squares is not None and squares.item() == pytest.approx(expected.double().square().sum().item(), rel=1e-6)
    assert squares.item() == sum_of_squares(out).item()


@pytest.mark.parametrize("own", [0, 1, 2, 3])
def test_out_may_be_any_of_the_parts(own: int) -> None:
    parts = parts_of(4, 1000)
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    ordered_sum(parts, parts[own], add=False, factor=1.0, measure=False)
    assert torch.equal(parts[own], expected)


def test_sixteen_bit_parts_are_added_in_float32() -> None:
    parts = [torch.full((8,), 256.0, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)]
    out = torch.zeros(8)
    ordered_sum([*parts, parts[1]], out, add=False, factor=1.0, measure=False)
    assert out.tolist() == [258.0] * 8  # bfloat16 accumulation would round both ones away
