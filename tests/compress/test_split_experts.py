"""Tests of experts as separate layers: their sum, their bits in any batch, and their joined products in the engine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.causal_models import build
from windlass.compress.split_experts import SplitExperts, can_split
from windlass.inference.packed_modules import find_groups
from windlass.kernels.packed_linear import PackedLinear, pack_linear_layers

EXPERTS, HIDDEN = 8, 64


def make_experts(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, SplitExperts]:
    """Return the stacked experts of a layer, and the same as separate layers."""
    model: Any = build("mixtral", hidden_size=HIDDEN, intermediate_size=96, num_local_experts=EXPERTS).to(dtype)
    stacked: nn.Module = next(one for one in model.modules() if can_split(one))
    return stacked, SplitExperts(copy.deepcopy(stacked))


def route(tokens: int, chosen: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, and the numbers and weights of the experts of each token."""
    drawn = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, EXPERTS, generator=drawn)
    weights, numbers = scores.topk(chosen, dim=-1)
    return torch.randn(tokens, HIDDEN, generator=drawn), numbers, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "chosen"), [(0, 2), (1, 1), (1, 3), (2, 2), (40, 2), (5, EXPERTS)])
def test_the_sum_of_the_chosen_experts(tokens: int, chosen: int, dtype: torch.dtype) -> None:
    stacked, split = make_experts(dtype)
    hidden, numbers, weights = route(tokens, chosen)
    hidden = hidden.to(dtype)
    with torch.no_grad():
        wanted, found = stacked(hidden, numbers, weights), split(hidden, numbers, weights)
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)
    beyond = torch.full_like(numbers, EXPERTS)  # the number of a token that another rank computes
    assert not split(hidden, beyond, weights).any()


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_any_batch(dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    _, split = make_experts()
    pack_linear_layers(split, "int4_g32")
    hidden, numbers, weights = route(7, 3)
    hidden, weights = hidden.to(dtype), weights.to(weights_dtype)
    with torch.no_grad():
        together = split(hidden, numbers, weights)
        for token in range(7):
            alone = split(hidden[token : token + 1], numbers[token : token + 1], weights[token : token + 1])
            assert torch.equal(alone[0], together[token])


def test_gate_and_up_are_one_product_of_each_expert_that_ran_or_not() -> None:
    _, split = make_experts()
    pack_linear_layers(split, "int4_g32", lambda name: not name.startswith("7."))
    split.get_submodule("7").gate_proj = PackedLinear.from_linear(split.get_submodule("7.gate_proj"), "int4_g32")  # type: ignore[assignment, arg-type]
    hidden, _, weights = route(1, 2)
    groups = find_groups(split, lambda: split(hidden, torch.tensor([[2, 5]]), weights), None)
    names = {module: name for name, module in split.named_modules()}
    found = sorted(sorted(names[module] for module in group) for group in groups)
    joined = [[f"{number}.down_proj"] for number in range(8)]
    joined += [[f"{number}.gate_proj", f"{number}.up_proj"] for number in range(7)]
    # the layers of expert 7 have different formats
    assert found == sorted([*joined, ["7.gate_proj"], ["7.up_proj"]])
