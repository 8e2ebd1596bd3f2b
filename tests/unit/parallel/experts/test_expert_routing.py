"""Tests that routers choose and weight experts as those of transformers do, and sample by probability."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from windlass.parallel.experts.expert_routing import (
    RoutingRule,
    choose_experts,
    compute_expert_weights,
    compute_router_scores,
    gumbel_like,
)

EXPERTS, HIDDEN = 8, 16


def deepseek_v3(**more: Any) -> Any:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3TopkRouter

    config = DeepseekV3Config(hidden_size=HIDDEN, n_routed_experts=EXPERTS, num_experts_per_tok=3, **more)
    router = DeepseekV3TopkRouter(config)
    router.e_score_correction_bias.copy_(torch.randn(EXPERTS) * 0.1)
    return router


def deepseek_v2(**more: Any) -> Any:
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Config, DeepseekV2TopkRouter

    return DeepseekV2TopkRouter(
        DeepseekV2Config(
            hidden_size=HIDDEN, num_attention_heads=4, n_routed_experts=EXPERTS, num_experts_per_tok=3, **more
        )
    )


def mixtral(**more: Any) -> Any:
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralTopKRouter

    return MixtralTopKRouter(
        MixtralConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=2, **more)
    )


@pytest.mark.parametrize(
    ("build", "rule"),
    [
        (mixtral, RoutingRule(EXPERTS, 2)),
        (
            lambda: deepseek_v2(n_group=4, topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=1.5),
            RoutingRule(
                EXPERTS,
                3,
                num_expert_groups=4,
                num_limited_groups=2,
                normalize_weights=False,
                routed_scaling_factor=1.5,
            ),
        ),
        (
            lambda: deepseek_v3(n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5),
            RoutingRule(EXPERTS, 3, "sigmoid", num_expert_groups=4, num_limited_groups=2, routed_scaling_factor=2.5),
        ),
        (
            lambda: deepseek_v3(n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0),
            RoutingRule(EXPERTS, 3, "sigmoid", normalize_weights=False),
        ),
    ],
)
def test_routing_rules_equal_transformers(build: Any, rule: RoutingRule) -> None:
    torch.manual_seed(0)
    router = build()
    torch.nn.init.normal_(router.weight)
    tokens = torch.randn(64, HIDDEN)
    logits, expected, chosen = router(tokens)
    scores = compute_router_scores(logits, rule)
    index = choose_experts(logits, scores, rule, bias=getattr(router, "e_score_correction_bias", None))
    weights = compute_expert_weights(scores, index, rule)
    actual = torch.zeros(64, EXPERTS).scatter(1, index, weights)
    requested = torch.zeros(64, EXPERTS).scatter(1, chosen, expected.float())
    assert torch.equal(index.sort(-1).values, chosen.sort(-1).values)
    torch.testing.assert_close(actual, requested)


def test_gumbel_noise_samples_by_probability() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.1, 1.2, -0.7]).expand(200_000, 3)
    drawn = (logits + gumbel_like(logits)).argmax(-1)
    fractions = torch.bincount(drawn, minlength=3) / len(drawn)
    torch.testing.assert_close(fractions, logits[0].softmax(-1), atol=5e-3, rtol=0)


def test_second_expert_differs_from_the_first() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 0.5, 0.0, -1.0]).expand(100_000, 4).clone()
    rule = RoutingRule(4, 2, sample_second_expert=True)
    index = choose_experts(logits, compute_router_scores(logits, rule), rule)
    assert (index[:, 0] == 0).all() and (index[:, 1] != 0).all()
    fractions = torch.bincount(index[:, 1], minlength=4)[1:] / len(index)
    torch.testing.assert_close(fractions, logits[0, 1:].softmax(-1), atol=1e-2, rtol=0)
    quiet = choose_experts(logits, compute_router_scores(logits, rule), rule, training=False)
    assert quiet.unique(dim=0).tolist() == [[0, 1]]


def test_dropped_slot_has_zero_weight_and_the_others_are_renormalized() -> None:
    scores = torch.tensor([[0.5, 0.3, 0.2]])
    result = compute_expert_weights(scores, torch.tensor([[0, 3]]), RoutingRule(3, 2))
    assert result.tolist() == [[1.0, 0.0]]
    assert compute_expert_weights(scores, torch.tensor([[3, 3]]), RoutingRule(3, 2)).tolist() == [[0.0, 0.0]]
