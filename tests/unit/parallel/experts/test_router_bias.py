"""Tests that each update lowers the biases of overloaded experts and raises the others, until a router is balanced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.comm.mesh_axis import single_rank_axis
from windlass.parallel.experts import MixtureOfExperts, enable_router_bias_updates, update_router_biases
from windlass.parallel.experts.router_bias import count_tokens_per_expert


def skewed(rate: float) -> MixtureOfExperts:
    """Return a layer in which nearly all tokens prefer expert 0."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(4, nn.Linear(4, 4), 4, k=1, drop_tokens=False, expert_bias_update_rate=rate)
    gate: Any = layer.deepspeed_moe["gate"]
    gate.wg.weight.data = torch.randn(4, 4) * 0.3
    gate.wg.weight.data[0] += 0.5
    return layer


def test_bias_changes_against_the_load_by_its_rate() -> None:
    layer = skewed(0.25)
    gate: Any = layer.deepspeed_moe["gate"]
    counts = layer(torch.rand(50, 4))[2] + layer(torch.rand(30, 4))[2]  # two micro-batches
    layer.eval()
    layer(torch.rand(30, 4))  # tokens in evaluation are not counted
    assert update_router_biases(layer, [single_rank_axis("data")]) == 1
    expected = [0.25 if count < 20 else -0.25 if count > 20 else 0.0 for count in counts.tolist()]
    assert gate.balance_bias.tolist() == expected
    # no tokens since the last update: the bias stays
    assert update_router_biases(layer, [single_rank_axis("data")]) == 1
    assert gate.balance_bias.tolist() == expected


def test_a_second_rate_replaces_the_first() -> None:
    router: Any = nn.Module()
    router.register_buffer("e_score_correction_bias", torch.zeros(4))
    for rate in (0.25, 0.5):
        assert enable_router_bias_updates(router, rate) == [""]
        assert router._balance.expert_bias_update_rate == rate


def test_skewed_router_is_balanced() -> None:
    layer, tokens = skewed(0.01), torch.rand(400, 4)
    before = layer(tokens)[2]
    assert int(before.max()) > 250
    for _ in range(100):
        counts = layer(tokens)[2]
        update_router_biases(layer, [])
    assert int(counts.max()) < 130


def test_the_bias_stays_fp32_is_saved_and_changes_no_weight() -> None:
    layer = skewed(0.001).bfloat16()
    gate: Any = layer.deepspeed_moe["gate"]
    assert gate.balance_bias.dtype == torch.float32 and gate.wg.weight.dtype == torch.bfloat16
    assert "deepspeed_moe.gate.balance_bias" in layer.state_dict()
    gate.balance_bias += torch.tensor([-100.0, 0, 0, 0])
    routed = gate(torch.rand(20, 4))
    assert (
        not (routed.expert_index == 0).any()
        and bool((routed.expert_weights > 0).all())
        and bool((routed.expert_weights < 1).all())
    )


def test_a_model_without_balanced_routers_is_left_alone() -> None:
    assert update_router_biases(MixtureOfExperts(4, nn.Linear(4, 4), 4), [single_rank_axis("data")]) == 0
    with pytest.raises(ModelError, match="Linear has no router with a buffer e_score_correction_bias"):
        enable_router_bias_updates(nn.Linear(2, 2), 0.1)


def test_routers_of_transformers_are_balanced_too() -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3TopkRouter

    torch.manual_seed(0)
    config = DeepseekV3Config(hidden_size=8, n_routed_experts=6, num_experts_per_tok=2, n_group=1, topk_group=1)
    model = nn.ModuleDict({"gate": DeepseekV3TopkRouter(config)})
    router: Any = model["gate"]
    nn.init.normal_(router.weight)
    # enabling twice has no further effect
    assert enable_router_bias_updates(model, 0.5) == ["gate"] == enable_router_bias_updates(model, 0.5)
    _, _, index = router(torch.randn(20, 8))
    assert update_router_biases(model, []) == 1
    mean = 40 / 6
    assert router.e_score_correction_bias.tolist() == [
        0.5 if count < mean else -0.5 for count in torch.bincount(index.flatten(), minlength=6).tolist()
    ]


def test_non_experts_are_not_counted() -> None:
    assert count_tokens_per_expert(torch.tensor([[0, 2], [2, 3], [7, 1]]), 3).tolist() == [1, 1, 2]
