"""Experts that take no more than so many tokens, and which ones they leave out."""

from __future__ import annotations

import math
from typing import Literal

import torch

from windlass.parallel.experts.order import order_of

Priority = Literal["position", "random", "score"]


def capacity_of(tokens: int, experts: int, k: int, factor: float, minimum: int) -> int:
    """How many tokens an expert takes: `factor` times its even share of `tokens x k`, rounded up, or `minimum`.

    GShard (arXiv:2006.16668, 2.2), Switch Transformer (arXiv:2101.03961, eq. 3).
    """
    return max(math.ceil(round(tokens / experts * factor * k, 6)), minimum)  # 10 x 1.1 is 11, whatever floats say


def leave_out(
    index: torch.Tensor, experts: int, capacity: int, priority: Priority, scores: torch.Tensor | None = None
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
    order = order_of(index.reshape(-1)[before][:, None], experts)
    first = torch.cat([order.counts.cumsum(0) - order.counts, order.counts.new_zeros(1)])  # nobody's: whatever
    asked = index.reshape(-1)[before]
    taken = order.place[:, 0] - first[asked.clamp(max=experts)] < capacity
    kept = torch.empty_like(asked)
    kept[before] = asked.masked_fill(~taken, experts)
    return kept.view(tokens, k)
