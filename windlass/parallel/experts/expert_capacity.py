"""Experts that take no more than so many tokens, and which ones they leave out."""

from __future__ import annotations

import math
from typing import Literal

import torch

from windlass.parallel.experts.token_permutation import sort_by_expert

CapacityPriority = Literal["position", "random", "score"]


def compute_expert_capacity(tokens: int, num_experts: int, k: int, capacity_factor: float, min_capacity: int) -> int:
    """How many tokens an expert takes: `factor` times its even share of `tokens x k`, rounded up, or `minimum`.

    GShard (arXiv:2006.16668, 2.2), Switch Transformer (arXiv:2101.03961, eq. 3).
    """
    return max(
        math.ceil(round(tokens / num_experts * capacity_factor * k, 6)), min_capacity
    )  # 10 x 1.1 is 11, whatever floats say


def drop_over_capacity(
    index: torch.Tensor, num_experts: int, capacity: int, priority: CapacityPriority, scores: torch.Tensor | None = None
) -> torch.Tensor:
    """`index` with `experts`, for nobody, in slots for which their expert has no room.

    Args:
        index: `[tokens, k]`, the expert of each slot, or `experts` for nobody.
        capacity: how many tokens an expert takes.
        priority: who is taken first. "position": all tokens' first choices, then their second ones, earlier tokens
            first (GShard); "random": any (random token selection, arXiv:2109.10465); "score": the highest `scores`
            (batch prioritized routing, arXiv:2106.05974).
        scores: `[tokens, k]`, of the slots.
    """
    tokens, k = index.shape
    if priority == "position":
        before = torch.arange(tokens * k, device=index.device).view(k, tokens).t().reshape(-1).argsort()
    elif priority == "random":
        before = torch.rand(tokens * k, device=index.device).argsort()
    else:
        assert scores is not None, "a priority by score needs scores"
        before = scores.detach().reshape(-1).argsort(descending=True, stable=True)
    order = sort_by_expert(index.reshape(-1)[before][:, None], num_experts)
    first = torch.cat(
        [order.tokens_per_expert.cumsum(0) - order.tokens_per_expert, order.tokens_per_expert.new_zeros(1)]
    )  # nobody's: whatever
    asked = index.reshape(-1)[before]
    taken = order.slot_positions[:, 0] - first[asked.clamp(max=num_experts)] < capacity
    kept = torch.empty_like(asked)
    kept[before] = asked.masked_fill(~taken, num_experts)
    return kept.view(tokens, k)
