"""Limit on the number of tokens per expert, and the choice of tokens that are dropped."""

from __future__ import annotations

import math
from typing import Literal

import torch

from windlass.parallel.experts.token_permutation import sort_by_expert

CapacityPriority = Literal["position", "random", "score"]


def compute_expert_capacity(tokens: int, num_experts: int, k: int, capacity_factor: float, min_capacity: int) -> int:
    """Return the maximum number of tokens per expert: `capacity_factor` times the even share of `tokens x k`, rounded
    up, but at least `min_capacity`.

    Source: GShard (arXiv:2006.16668, 2.2), Switch Transformer (arXiv:2101.03961, eq. 3).
    """
    return max(
        math.ceil(round(tokens / num_experts * capacity_factor * k, 6)), min_capacity
    )  # round(): 10 x 1.1 is 11, despite floating-point error


def drop_over_capacity(
    index: torch.Tensor, num_experts: int, capacity: int, priority: CapacityPriority, scores: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `index` with `num_experts`, which means "no expert", in each slot that exceeds its expert's capacity. A
    slot is one of the `k` choices of a token.

    Args:
        index: `[tokens, k]`, the expert of each slot, or `num_experts` for an unused slot.
        capacity: maximum number of tokens per expert.
        priority: order in which slots are accepted. "position": first choices of all tokens, then second choices,
            earlier tokens first (GShard); "random": random order (random token selection, arXiv:2109.10465); "score":
            highest `scores` first (batch prioritized routing, arXiv:2106.05974).
        scores: `[tokens, k]`, scores of the slots; required by "score", else unused.
    """
    tokens, k = index.shape
    if priority == "position":
        before = torch.arange(tokens * k, device=index.device).view(k, tokens).t().reshape(-1).argsort()
    elif priority == "random":
        before = torch.rand(tokens * k, device=index.device).argsort()
    else:
        assert scores is not None, 'priority "score" needs scores'
        before = scores.detach().reshape(-1).argsort(descending=True, stable=True)
    order = sort_by_expert(index.reshape(-1)[before][:, None], num_experts)
    first = torch.cat(
        [order.tokens_per_expert.cumsum(0) - order.tokens_per_expert, order.tokens_per_expert.new_zeros(1)]
    )  # the last entry serves unused slots, whose value is not used
    requested = index.reshape(-1)[before]
    taken = order.slot_positions[:, 0] - first[requested.clamp(max=num_experts)] < capacity
    kept = torch.empty_like(requested)
    kept[before] = requested.masked_fill(~taken, num_experts)
    return kept.view(tokens, k)
