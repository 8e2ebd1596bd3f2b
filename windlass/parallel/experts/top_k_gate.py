"""Router of the `MoE` layer: experts and weights of each token, and the load-balancing loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from windlass.parallel.experts.expert_capacity import CapacityPriority, compute_expert_capacity, drop_over_capacity
from windlass.parallel.experts.expert_routing import (
    RoutingRule,
    choose_experts,
    compute_expert_weights,
    compute_router_scores,
    jitter_input,
)
from windlass.parallel.experts.router_bias import RouterBias, count_tokens_per_expert


def load_balancing_loss(probabilities: torch.Tensor, tokens_per_expert: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Compute the number of experts times the sum over experts of (mean probability) x (fraction of choices). The loss
    is 1 if both are even.

    Source: GShard (arXiv:2006.16668, algorithm 1), Switch Transformer (arXiv:2101.03961, eq. 4).

    Args:
        probabilities: `[tokens, experts]`; each row sums to 1.
        tokens_per_expert: `[experts]`, number of choices of each expert.
        num_slots: number of slots (choices of all tokens), including unused slots.
    """
    fraction = tokens_per_expert.to(probabilities.dtype) / max(num_slots, 1)
    mean = probabilities.sum(0) / max(probabilities.shape[0], 1)
    return (mean * fraction).sum() * probabilities.shape[1]


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Compute the mean squared log-sum-exp of `[tokens, experts]`, which penalizes large logits (ST-MoE,
    arXiv:2202.08906, eq. 5).
    """
    return logits.logsumexp(-1).square().sum() / max(logits.shape[0], 1)


def normalize_scores(scores: torch.Tensor) -> torch.Tensor:
    """Normalize the scores of each token to sum to 1 (DeepSeek-V3, arXiv:2412.19437, eq. 19)."""
    return scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).eps)


@dataclass(frozen=True)
class CapacityLimit:
    """Limit on the tokens per expert.

    Attributes:
        capacity_factor, eval_capacity_factor: limit divided by the even share (choices / experts), in training and
            in evaluation.
        min_capacity: lower bound of the limit.
        capacity_priority: order in which tokens are accepted (`drop_over_capacity`).
    """

    capacity_factor: float = 1.0
    eval_capacity_factor: float = 1.0
    min_capacity: int = 4
    capacity_priority: CapacityPriority = "position"


@dataclass(frozen=True)
class RoutingResult:
    """Routing of a rank's tokens.

    Attributes:
        expert_index: `[tokens, k]`, expert numbers; the value `num_experts` marks an unused slot.
        expert_weights: `[tokens, k]`, fp32.
        loss: the load-balancing loss, plus the weighted z-loss if it has a weight; a scalar.
        tokens_per_expert: `[experts]`, number of these tokens that chose each expert, before any was dropped.
    """

    expert_index: torch.Tensor
    expert_weights: torch.Tensor
    loss: torch.Tensor
    tokens_per_expert: torch.Tensor


class TopKGate(nn.Module):
    """Linear router, computed in fp32.

    Args:
        hidden_size: width of a token.
        routing_rule: rule by which experts are chosen.
        capacity_limit: limit on the tokens per expert; None: no limit.
        z_loss_weight: weight of the z-loss, where the balance loss has weight 1.
        expert_bias_update_rate: step by which `update_router_biases` moves the score bias; 0: no bias.
    """

    def __init__(
        self,
        hidden_size: int,
        routing_rule: RoutingRule,
        capacity_limit: CapacityLimit | None = None,
        *,
        z_loss_weight: float = 0.0,
        expert_bias_update_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(hidden_size, routing_rule.num_experts, bias=False)
        self.routing_rule, self.capacity_limit, self.z_loss_weight = routing_rule, capacity_limit, z_loss_weight
        self._balance: RouterBias | None = None
        if expert_bias_update_rate:
            self.register_buffer("balance_bias", torch.zeros(routing_rule.num_experts))
            self._balance = RouterBias(self, "balance_bias", expert_bias_update_rate)

    def forward(self, tokens: torch.Tensor, used_token: torch.Tensor | None = None) -> RoutingResult:
        """Route tokens `[tokens, hidden]`. Tokens with 0 in `used_token` `[tokens]` get no expert."""
        rule = self.routing_rule
        with torch.autocast(tokens.device.type, enabled=False):
            tokens = tokens.float()
            if rule.noise == "Jitter" and self.training:
                tokens = jitter_input(tokens)
            logits = functional.linear(tokens, self.wg.weight.float())
            scores = compute_router_scores(logits, rule)
            bias = self.balance_bias if self._balance is not None else None
            index = choose_experts(logits, scores, rule, bias=bias, training=self.training)
            if used_token is not None:
                index = index.masked_fill(used_token.reshape(-1, 1).eq(0), rule.num_experts)
            counts = count_tokens_per_expert(index, rule.num_experts)
            if self._balance is not None and self.training:
                self._balance.count_tokens(index)
            loss = self._balancing_loss(logits, scores, index, counts)
            if self.capacity_limit is not None:
                index = self._drop_over_capacity(index, scores, self.capacity_limit)
            return RoutingResult(index, compute_expert_weights(scores, index, rule), loss, counts)

    def _balancing_loss(
        self, logits: torch.Tensor, scores: torch.Tensor, index: torch.Tensor, tokens_per_expert: torch.Tensor
    ) -> torch.Tensor:
        if self.routing_rule.k == 2:  # first choices only, as GShard and DeepSpeed count them
            index = index[:, :1]
            tokens_per_expert = count_tokens_per_expert(index, self.routing_rule.num_experts)
        loss = load_balancing_loss(normalize_scores(scores), tokens_per_expert, index.numel())
        return loss + self.z_loss_weight * z_loss(logits) if self.z_loss_weight else loss

    def _drop_over_capacity(self, index: torch.Tensor, scores: torch.Tensor, limit: CapacityLimit) -> torch.Tensor:
        experts = self.routing_rule.num_experts
        factor = limit.capacity_factor if self.training else limit.eval_capacity_factor
        room = compute_expert_capacity(index.shape[0], experts, self.routing_rule.k, factor, limit.min_capacity)
        chosen = scores.gather(1, index.clamp(max=experts - 1)) if limit.capacity_priority == "score" else None
        return drop_over_capacity(index, experts, room, limit.capacity_priority, chosen)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Apply `fn` as any module does, but keep the bias in fp32: 16 bits would round its steps away."""
        before = self._buffers.get("balance_bias")
        module = super()._apply(fn, recurse)
        after = self._buffers.get("balance_bias")
        if before is not None and after is not None and after.dtype != before.dtype:
            self.balance_bias = before.to(after.device)
        return module
