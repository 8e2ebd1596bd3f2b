"""The router of `MoE`: from tokens to experts, weights, and the loss that keeps it balanced."""

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
from windlass.parallel.experts.router_losses import load_balancing_loss, normalize_scores, z_loss


@dataclass(frozen=True)
class CapacityLimit:
    """How many tokens an expert takes.

    Attributes:
        factor, eval_factor: times its even share, in training and out of it.
        minimum: at least so many.
        priority: whom it takes first (`capacity.leave_out`).
    """

    capacity_factor: float = 1.0
    eval_capacity_factor: float = 1.0
    min_capacity: int = 4
    capacity_priority: CapacityPriority = "position"


@dataclass(frozen=True)
class RoutingResult:
    """Where tokens go.

    Attributes:
        index: `[tokens, k]`, experts; one more than the last for nobody.
        weights: `[tokens, k]`, fp32.
        loss: what balancing costs, a scalar.
        counts: `[experts]`, how many of these tokens chose each one, before any was left out.
    """

    expert_index: torch.Tensor
    expert_weights: torch.Tensor
    loss: torch.Tensor
    tokens_per_expert: torch.Tensor


class TopKGate(nn.Module):
    """A linear router, computed in fp32.

    Args:
        hidden_size: of tokens.
        rule: how experts are chosen.
        limit: how many tokens an expert takes; None: all that choose it.
        z_weight: of the z-loss beside the balance loss.
        balance_rate: how far `update_balance` moves the bias of scores in a step; 0: there is none.
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
        """Route `[tokens, hidden]`; those whose `used_token` `[tokens]` is 0 go nowhere."""
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
        if self.routing_rule.k == 2:  # first choices alone, as GShard and DeepSpeed count them
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
        """As any module's; the bias stays fp32, since 16 bits would round its steps away."""
        before = self._buffers.get("balance_bias")
        module = super()._apply(fn, recurse)
        after = self._buffers.get("balance_bias")
        if before is not None and after is not None and after.dtype != before.dtype:
            self.balance_bias = before.to(after.device)
        return module
