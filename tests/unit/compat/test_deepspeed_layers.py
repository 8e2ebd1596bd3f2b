"""Tests of layers and functions that scripts import from DeepSpeed: each equals plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from windlass.compat.mask_gating import (
    PolicyError,
    _route_slots,
    _sparse_decode,
    _sparse_encode,
    top1gating,
    top2gating,
    topkgating,
)
from windlass.compat.tiled_linear import TiledLinear, TiledLinearReturnBias
from windlass.compat.zero_linear import LinearModuleForZeroStage3, zero3_linear_wrap


@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 1), (2, 3), (5, 1), (7, 11)])
@pytest.mark.parametrize("bias", [True, False])
def test_tiled_layer_equals_the_layer(in_splits: int, out_splits: int, bias: bool) -> None:
    """Tiles have the output, input gradient and weight gradient of the whole layer."""
    full = nn.Linear(7, 11, bias=bias)
    tiled = TiledLinear(7, 11, bias=bias, in_splits=in_splits, out_splits=out_splits, init_linear=full)
    x = torch.randn(3, 2, 7, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    full(x).square().sum().backward()
    output = tiled(y)
    output.square().sum().backward()
    torch.testing.assert_close(output, full(x))
    torch.testing.assert_close(y.grad, x.grad)
    rows = [torch.cat([tile.weight.grad for tile in row], dim=1) for row in tiled.linears]  # type: ignore[union-attr,misc]
    torch.testing.assert_close(torch.cat(rows), full.weight.grad)


def test_tiles_of_layers_that_return_their_bias() -> None:
    class Apart(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            return F.linear(x, self.weight), self.bias

    full = nn.Linear(6, 4)
    tiled = TiledLinearReturnBias(6, 4, in_splits=2, out_splits=2, linear_cls=Apart, init_linear=full)
    x = torch.randn(5, 6)
    output, bias = tiled(x)
    torch.testing.assert_close(output + bias, full(x))


@pytest.mark.parametrize("splits", [0, 5])
def test_tiles_of_wrong_sizes_are_refused(splits: int) -> None:
    with pytest.raises(RuntimeError, match="in_splits"):
        TiledLinear(4, 4, in_splits=splits)
    with pytest.raises(RuntimeError, match="out_splits"):
        TiledLinear(4, 4, out_splits=splits)
    with pytest.raises(RuntimeError, match="features"):
        TiledLinear(4, 4, init_linear=nn.Linear(4, 3))


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8)])
@pytest.mark.parametrize("autocast", [False, True])
def test_stage_3_linear(shape: tuple[int, ...], autocast: bool) -> None:
    """The function has the output and gradients of `F.linear`, in the same dtypes, also under autocast."""
    results = []
    for function in (F.linear, zero3_linear_wrap):
        torch.manual_seed(0)
        x = torch.randn(shape, requires_grad=True)
        weight, bias = torch.randn(4, 8, requires_grad=True), torch.randn(4, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = function(x, weight, bias)
        output.float().square().sum().backward()
        assert x.grad is not None and weight.grad is not None and bias.grad is not None
        results.append((output, x.grad, weight.grad, bias.grad))
    for plain, ours in zip(*results, strict=True):
        assert plain.dtype == ours.dtype
        torch.testing.assert_close(ours, plain, rtol=2e-2 if autocast else 1e-5, atol=2e-2 if autocast else 1e-5)


def test_stage_3_linear_under_function_transforms() -> None:
    module = LinearModuleForZeroStage3(8, 4)
    x = torch.randn(3, 8)
    gradients, value = torch.func.grad_and_value(lambda w: zero3_linear_wrap(x, w, None).sum())(module.weight)
    torch.testing.assert_close(value, (x @ module.weight.t()).sum())
    torch.testing.assert_close(gradients, x.sum(0).expand(4, 8))
    torch.testing.assert_close(module(x), F.linear(x, module.weight, module.bias))


def _routes(k: int, logits: torch.Tensor, factor: float, **others: Any) -> Any:
    if k == 1:
        return top1gating(logits, factor, 0, use_rts=False, **others)
    if k == 2:
        return top2gating(logits, factor, 0, top2_2nd_expert_sampling=False, **others)
    return topkgating(logits, k, factor, 0, **others)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_routes_as_masks(k: int, factor: float) -> None:
    """A capacity slot takes one token, tokens go to their k best experts, and `sparse_routes` equals the masks."""
    torch.manual_seed(k)
    logits = torch.randn(12, 4)
    loss, weights, mask, counts = _routes(k, logits, factor)
    capacity = int(-(-12 / 4 * factor * k // 1))
    assert mask.shape == (12, 4, capacity) and counts.sum() == 12 * k
    assert int(mask.sum(dim=0).max()) <= 1 and torch.equal(mask, weights != 0)
    gates = logits.softmax(dim=1)
    best = torch.zeros(12, 4, dtype=torch.bool).scatter_(1, gates.topk(k, dim=1).indices, True)
    assert not (mask.any(dim=2) & ~best).any()
    share = F.one_hot(gates.argmax(dim=1), 4) if k < 3 else best / k
    torch.testing.assert_close(loss, 4 * (gates.mean(0) * share.float().mean(0)).sum())
    if k > 1:
        total = weights.sum(dim=(1, 2))
        torch.testing.assert_close(total, mask.any(dim=2).any(dim=1).float())
    _, room, experts, index, place, weight, _ = _routes(k, logits, factor, sparse_routes=True)
    assert (int(room), experts) == (capacity, 4)
    again = torch.zeros_like(weights)
    for choice, token in (index >= 0).nonzero().tolist():
        again[token, index[choice, token], place[choice, token]] += weight[choice, token]
    torch.testing.assert_close(again, weights)
    tokens, outputs = torch.randn(12, 5), torch.randn(4, capacity, 5)
    rows = _route_slots(index, place, 4, capacity)
    sent = _sparse_encode(tokens, rows, 4, capacity)
    torch.testing.assert_close(sent, torch.einsum("sec,sm->ecm", mask.float(), tokens))
    received = _sparse_decode(outputs.flatten(0, 1), rows, weight, 12)
    torch.testing.assert_close(received, torch.einsum("sec,ecm->sm", weights, outputs))
    _, full, _, _ = _routes(k, logits, factor, drop_tokens=False)
    assert full.shape[2] == min(int(counts.max()), 12) and (full != 0).sum() == 12 * k


def test_unknown_routes_are_refused() -> None:
    with pytest.raises(PolicyError, match="drop_policy"):
        topkgating(torch.randn(4, 2), 1, 1.0, 0, drop_policy="luck")
    with pytest.raises(AssertionError, match="min_capacity"):
        top1gating(torch.randn(4, 2), 1.0, 5)
