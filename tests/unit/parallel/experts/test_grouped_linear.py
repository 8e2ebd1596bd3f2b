"""Tests that the grouped kernel, a loop over experts and explicit products agree, forward and backward."""

from __future__ import annotations

import pytest
import torch

from tests.oracle import relative_error
from windlass.parallel.experts.grouped_linear import RowGroups, grouped_linear, has_grouped_kernel

COUNTS = ([3, 4, 5], [0, 7, 0], [12, 0, 0], [0, 0, 0])


def operands(
    counts: list[int], inner: int, outer: int, dtype: torch.dtype, transposed: bool, bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), inner, dtype=dtype, requires_grad=True)
    shape = (len(counts), inner, outer) if transposed else (len(counts), outer, inner)
    weight = torch.randn(*shape, dtype=dtype, requires_grad=True)
    return rows, weight, torch.randn(len(counts), outer, dtype=dtype, requires_grad=True) if bias else None


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("inner", "outer", "dtype", "kernel"),
    [
        (16, 24, torch.float32, True),
        (16, 24, torch.bfloat16, True),
        (6, 10, torch.float32, False),  # strides that the kernel refuses
        (16, 24, torch.float64, False),  # a dtype that the kernel refuses
    ],
)
def test_a_grouped_product_equals_one_product_an_expert(
    counts: list[int], transposed: bool, bias: bool, inner: int, outer: int, dtype: torch.dtype, kernel: bool
) -> None:
    rows, weight, added = operands(counts, inner, outer, dtype, transposed, bias)
    given = [entry for entry in (rows, weight, added) if entry is not None]
    assert has_grouped_kernel(rows, weight) == kernel
    actual = grouped_linear(rows, weight, RowGroups(torch.tensor(counts)), added, transposed=transposed)
    expected = []
    for expert, part in enumerate(rows.split(counts)):
        matrix = weight[expert] if transposed else weight[expert].T
        expected.append(part @ matrix if added is None else part @ matrix + added[expert])
    pull = torch.randn_like(actual)
    have = torch.autograd.grad(actual, given, pull)
    want = torch.autograd.grad(torch.cat(expected), given, pull)
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for number, (item, other) in enumerate(zip([actual, *have], [torch.cat(expected), *want], strict=True)):
        assert item.dtype == dtype
        assert relative_error({"it": item.detach()}, {"it": other.detach()})[0] < bound, number


def test_unaligned_address_uses_the_loop() -> None:
    """Unaligned addresses use the loop: parameters that are views into a buffer may begin anywhere."""
    buffer = torch.randn(1 + 2 * 8 * 8)
    weight = buffer[1:].view(2, 8, 8)
    rows, counts = torch.randn(5, 8), torch.tensor([2, 3])
    assert not has_grouped_kernel(rows, weight) and has_grouped_kernel(rows, weight.clone())
    result = grouped_linear(rows, weight, RowGroups(counts))
    torch.testing.assert_close(result, grouped_linear(rows, weight.clone(), RowGroups(counts)))


def test_autocast_casts_as_for_a_linear_layer() -> None:
    rows, weight, bias = operands([2, 0, 3], 16, 24, torch.float32, False, True)
    with torch.autocast("cpu", torch.bfloat16):
        actual = grouped_linear(rows, weight, RowGroups(torch.tensor([2, 0, 3])), bias)
    assert actual.dtype == torch.bfloat16
    actual.float().sum().backward()
    assert rows.grad is not None and rows.grad.dtype == torch.float32
    expected = grouped_linear(rows, weight, RowGroups(torch.tensor([2, 0, 3])), bias)
    assert relative_error({"it": actual.detach().float()}, {"it": expected.detach()})[0] < 2e-2


def test_group_of_each_row() -> None:
    groups = RowGroups(torch.tensor([2, 0, 3]))
    assert groups.expert_of(torch.zeros(5, 1)).tolist() == [0, 0, 2, 2, 2]
    assert groups.sizes() == [2, 0, 3] and RowGroups(torch.tensor([1]), [4]).sizes() == [4]
