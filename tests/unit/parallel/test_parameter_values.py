"""Tests of parameters that get other values while a graph of the old values is alive."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.parallel.parameter_values import replace_values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "shape"), [(0, [3, 4]), (1, [6, 2])])  # rows keep the strides, columns do not
def test_old_graphs_raise_and_later_graphs_have_the_new_shape(dtype: torch.dtype, dim: int, shape: list[int]) -> None:
    parameter = nn.Parameter(torch.randn(6, 4, dtype=dtype))
    old = parameter.sum()
    values = parameter.detach().narrow(dim, 0, shape[dim]).clone()
    replace_values(parameter, values)
    parameter.square().sum().backward()
    assert torch.equal(parameter, values) and torch.equal(parameter.grad, 2 * values)
    parameter.grad = None
    with pytest.raises(ModelError, match=rf"shape \[6, 4\] by its part of shape \[{shape[0]}, {shape[1]}\]"):
        old.backward()
    assert parameter.grad is None
    parameter.sum().backward()
    assert torch.equal(parameter.grad, torch.ones_like(values))


def test_values_of_inference_tensors_are_replaced() -> None:
    with torch.inference_mode():
        inside = nn.Parameter(torch.randn(6, 4))
        replace_values(inside, torch.ones(3, 4))
    assert torch.equal(inside, torch.ones(3, 4))
    outside = nn.Parameter(torch.randn(6, 4))
    with torch.inference_mode():
        replace_values(outside, torch.ones(3, 4))
    assert torch.equal(outside, torch.ones(3, 4))


def test_a_frozen_parameter_gets_the_values() -> None:
    parameter = nn.Parameter(torch.randn(6, 4), requires_grad=False)
    replace_values(parameter, torch.ones(3, 4))
    assert torch.equal(parameter, torch.ones(3, 4)) and not parameter.requires_grad
