"""The router of `MoE`: from tokens to experts, weights, and the loss that keeps it balanced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from windlass.parallel.experts.balance import Balance, chosen_of
from windlass.parallel.experts.capacity import Priority, capacity_of, leave_out
from windlass.parallel.experts.choice import Rule, choose, jittered, scores_of, weights_of
from windlass.parallel.experts.losses import balance_loss, probabilities_of, z_loss


@dataclass(frozen=True)
class Limit:
    """How many tokens an expert takes.

    Attributes:
        factor, eval_factor: times its even share, in training and out of it.
        minimum: at least so many.
        priority: whom it takes first (`capacity.leave_out`).
    """

    factor: float = 1.0
    eval_factor: float = 1.0
    minimum: int = 4
    priority: Priority = "position"


@dataclass(frozen=True)
class Routed:
    """Where tokens go.

    Attributes:
        index: `[tokens, k]`, experts; one more than the last for nobody.
        weights: `[tokens, k]`, fp32.
        loss: what balancing costs, a scalar.
        counts: `[experts]`, how many of these tokens chose each one, before any was left out.
    """

    index: torch.Tensor
    weights: torch.Tensor
    loss: torch.Tensor
    counts: torch.Tensor


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
        rule: Rule,
        limit: Limit | None = None,
        *,
        z_weight: float = 0.0,
        balance_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(hidden_size, rule.experts, bias=False)
        self.rule, self.limit, self.z_weight = rule, limit, z_weight
        self._balance: Balance | None = None
        if balance_rate:
            self.register_buffer("balance_bias", torch.zeros(rule.experts))
            self._balance = Balance(self, "balance_bias", balance_rate)

    def forward(self, tokens: torch.Tensor, used_token: torch.Tensor | None = None) -> Routed:
        """Route `[tokens, hidden]`; those whose `used_token` `[tokens]` is 0 go nowhere."""
        rule = self.rule
        with torch.autocast(tokens.device.type, enabled=False):
            tokens = tokens.float()
            if rule.noise == "Jitter" and self.training:
                tokens = jittered(tokens)
            logits = functional.linear(tokens, self.wg.weight.float())
            scores = scores_of(logits, rule)
            bias = self.balance_bias if self._balance is not None else None
            index = choose(logits, scores, rule, bias=bias, training=self.training)
            if used_token is not None:
                index = index.masked_fill(used_token.reshape(-1, 1).eq(0), rule.experts)
            counts = chosen_of(index, rule.experts)
            if self._balance is not None and self.training:
                self._balance.count(index)
            loss = self._loss(logits, scores, index, counts)
            if self.limit is not None:
                index = self._left_out(index, scores, self.limit)
            return Routed(index, weights_of(scores, index, rule), loss, counts)

    def _loss(
        self, logits: torch.Tensor, scores: torch.Tensor, index: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        if self.rule.k == 2:  # first choices alone, as GShard and DeepSpeed count them
            index = index[:, :1]
            counts = chosen_of(index, self.rule.experts)
        loss = balance_loss(probabilities_of(scores), counts, index.numel())
        return loss + self.z_weight * z_loss(logits) if self.z_weight else loss

    def _left_out(self, index: torch.Tensor, scores: torch.Tensor, limit: Limit) -> torch.Tensor:
        experts = self.rule.experts
        factor = limit.factor if self.training else limit.eval_factor
        room = capacity_of(index.shape[0], experts, self.rule.k, factor, limit.minimum)
        chosen = scores.gather(1, index.clamp(max=experts - 1)) if limit.priority == "score" else None
        return leave_out(index, experts, room, limit.priority, chosen)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """As any module's; the bias stays fp32, since 16 bits would round its steps away."""
        before = self._buffers.get("balance_bias")
        module = super()._apply(fn, recurse)
        after = self._buffers.get("balance_bias")
        if before is not None and after is not None and after.dtype != before.dtype:
            self.balance_bias = before.to(after.device)
        return module
