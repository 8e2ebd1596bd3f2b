"""Functions `top1gating`, `top2gating` and `topkgating` of `deepspeed.moe.sharded_moe`: routing as dense masks.

windlass's `MoE` routes by lists of experts (`windlass.parallel.experts.top_k_gate`) and does not call these.

Shapes: s tokens, e experts, c capacity (slots per expert), k choices per token.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.base.errors import ModelError
from windlass.compat import collectives as dist
from windlass.compat.parallel_groups import _current_mpu, bwc_tensor_model_parallel_world_size

TUTEL_INSTALLED = False
"""False: Tutel's kernels are never used."""


class CapacityError(ModelError, AssertionError):
    """Error for fewer tokens than `min_capacity`."""


class PolicyError(ModelError, ValueError):
    """Error for an unknown `drop_policy`."""


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: dist.ProcessGroup | None = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> Any:
    """Route each token to its best expert. Collective over `ep_group` if `drop_tokens` is False.

    Args:
        logits: `[s, e]`, fp32.
        capacity_factor: an expert's capacity as a multiple of its even share of the tokens.
        min_capacity: minimum capacity.
        used_token: `[s]`, 0 for tokens that are not routed.
        noisy_gate_policy: "RSample" adds Gumbel noise before the choice.
        drop_tokens: drop tokens over capacity; otherwise the capacity is the largest load of any expert on any rank.
        use_rts: an expert over capacity keeps random tokens. False: it keeps any of its tokens, in no defined order.
        sparse_routes: see Returns.
        use_tutel: no effect.

    Returns:
        `(loss, weights [s, e, c], mask [s, e, c], counts [e])`; with `sparse_routes` `(loss, c, e, experts [k, s] with
            -1 for dropped, slots [k, s], weights [k, s], counts [e])`. `counts`: number of tokens that chose an expert.

    Raises:
        CapacityError: there are fewer tokens than `min_capacity`.
    """
    gates = F.softmax(logits, dim=1)
    tokens, experts = gates.shape
    if tokens < min_capacity:
        raise CapacityError(
            f"{tokens} tokens are fewer than min_capacity {min_capacity}: lower it, or use larger batches"
        )
    scores = logits + _gumbel(logits) if noisy_gate_policy == "RSample" else gates
    chosen = scores.argmax(dim=1)
    mask = F.one_hot(chosen, experts)
    if used_token is not None:
        mask = mask * used_token.to(mask.dtype).unsqueeze(1)
    counts = mask.sum(dim=0).detach()
    loss = _balance_loss(gates, mask)
    if drop_tokens:
        capacity = _capacity(gates, capacity_factor, min_capacity)
    else:
        capacity = min(_max_expert_load(counts, ep_group), tokens)
    # Each expert keeps the tokens of highest priority. Among equal priorities, topk chooses arbitrarily.
    priority = mask * torch.rand_like(gates) if use_rts else mask
    kept = torch.zeros_like(mask).scatter_(0, priority.topk(min(capacity, tokens), dim=0).indices, 1)
    mask = mask * kept
    places = ((mask.cumsum(dim=0) - 1) * mask).sum(dim=1)
    weights = (gates * mask).sum(dim=1)
    return _format_routes(
        loss, capacity, experts, [chosen], [places], [weights], [mask.any(dim=1)], counts, sparse_routes
    )


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: dist.ProcessGroup | None = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> Any:
    """Route each token to its best two experts.

    `top2_2nd_expert_sampling` adds Gumbel noise before the choice of the second expert.

    The other arguments and the result are those of `top1gating`. With `drop_tokens`,
    `capacity_factor` is doubled, because each token makes two choices.
    """
    gates = F.softmax(logits, dim=1)
    experts = gates.shape[1]
    first = gates.argmax(dim=1)
    mask1 = F.one_hot(first, experts)
    others = logits + _gumbel(logits) if top2_2nd_expert_sampling else logits
    second = others.masked_fill(mask1.bool(), -math.inf).argmax(dim=1)
    mask2 = F.one_hot(second, experts)
    # Second choices fill the slots after all first choices of an expert.
    place1 = mask1.cumsum(dim=0) - 1
    place2 = mask2.cumsum(dim=0) - 1 + mask1.sum(dim=0, keepdim=True)
    counts = (mask1 + mask2).sum(dim=0).detach()
    loss = _balance_loss(gates, mask1)
    if drop_tokens:
        capacity = _capacity(gates, 2 * capacity_factor, min_capacity)
        mask1, mask2 = mask1 * (place1 < capacity), mask2 * (place2 < capacity)
    else:
        capacity = _max_expert_load(counts, ep_group)
    weights = torch.stack([(gates * mask).sum(dim=1) for mask in (mask1, mask2)])
    weights = weights / weights.sum(dim=0).clamp(min=torch.finfo(gates.dtype).eps)
    places = [(place * mask).sum(dim=1) for place, mask in ((place1, mask1), (place2, mask2))]
    kept = [mask1.any(dim=1), mask2.any(dim=1)]
    return _format_routes(loss, capacity, experts, [first, second], places, list(weights), kept, counts, sparse_routes)


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: dist.ProcessGroup | None = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> Any:
    """Route each token to its `k` best experts.

    The other arguments and the result are those of `top1gating`. With `drop_tokens`, `capacity_factor` is multiplied by
    `k`, because each token makes `k` choices.

    Args:
        drop_policy: an expert over capacity keeps the tokens of highest probability ("probs") or the first ones
            ("position").

    Raises:
        PolicyError: the policy is unknown, and `drop_tokens` is True.
    """
    gates = F.softmax(logits, dim=1)
    tokens, experts = gates.shape
    top, chosen = gates.topk(k, dim=1)
    mask = torch.zeros_like(gates, dtype=torch.bool).scatter_(1, chosen, True)
    counts = mask.sum(dim=0).detach()
    loss = _balance_loss(gates, mask) / k
    if not drop_tokens:
        capacity = _max_expert_load(counts, ep_group)
    else:
        capacity = _capacity(gates, k * capacity_factor, min_capacity)
        if drop_policy == "probs":
            asked = torch.zeros_like(gates).scatter(1, chosen, top)
            best = asked.topk(min(capacity, tokens), dim=0, sorted=False).indices
            mask &= torch.zeros_like(mask).scatter_(0, best, True)
        elif drop_policy == "position":
            mask &= mask.cumsum(dim=0) <= capacity
        else:
            raise PolicyError(f"drop_policy is {drop_policy!r}; choose probs or position")
    places = (mask.cumsum(dim=0) - 1) * mask
    weights = gates * mask
    weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(gates.dtype).eps)
    kept = list(mask.gather(1, chosen).unbind(dim=1))
    shares = list(weights.gather(1, chosen).unbind(dim=1))
    at = list(places.gather(1, chosen).unbind(dim=1))
    return _format_routes(loss, capacity, experts, list(chosen.unbind(dim=1)), at, shares, kept, counts, sparse_routes)


def _format_routes(
    loss: Tensor,
    capacity: int,
    experts: int,
    chosen: list[Tensor],
    places: list[Tensor],
    weights: list[Tensor],
    kept: list[Tensor],
    counts: Tensor,
    sparse: bool,
) -> Any:
    """Return the routes in the format of `top1gating`. Each list argument has one tensor `[s]` per choice."""
    index, place, weight, keep = (torch.stack(rows) for rows in (chosen, places, weights, kept))
    if sparse:
        index = torch.where(keep, index, -1)
        room = torch.tensor(capacity, device=index.device)
        return loss, room, experts, index.to(torch.int32), (place * keep).to(torch.int32), weight, counts
    pairs = F.one_hot(index, experts).to(weight.dtype) * (weight * keep).unsqueeze(2)
    spread = F.one_hot(place * keep, capacity).to(weight.dtype)
    combined = torch.einsum("kse,ksc->sec", pairs, spread)
    return loss, combined, combined.bool(), counts


def _capacity(gates: Tensor, factor: float, least: int) -> int:
    return max(math.ceil(gates.shape[0] / gates.shape[1] * factor), least)


def _max_expert_load(counts: Tensor, group: dist.ProcessGroup | None) -> int:
    """Return the largest load over the ranks of the group, rounded up to a multiple of the tensor-parallel size."""
    largest = counts.max()
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    unit = _current_mpu()
    shared = 1 if unit is None else bwc_tensor_model_parallel_world_size(unit)
    return math.ceil(int(largest) / shared) * shared


def _balance_loss(gates: Tensor, mask: Tensor) -> Tensor:
    """Return the load-balancing loss (GShard, arXiv:2006.16668, section 2.2).

    It is the number of experts times the sum over experts of an expert's mean probability times its fraction of tokens.
    """
    return (gates.mean(dim=0) * mask.float().mean(dim=0)).sum() * gates.shape[1]


def _gumbel(logits: Tensor) -> Tensor:
    return -torch.empty_like(logits).exponential_().log()


def _route_slots(experts: Tensor, places: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Return `[k, s]`, the row of each choice of each token in a buffer of `e * c` rows; `e * c` for a dropped choice.

    Args:
        experts: expert of each choice, `[k, s]`, -1 for a dropped one.
        places: slot of each choice at its expert, `[k, s]`.
    """
    return torch.where(experts < 0, num_experts * capacity, experts.long() * capacity + places)


def _sparse_encode(tokens: Tensor, rows: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Copy tokens `[s, m]` to their rows of `_route_slots`, and return `[e, c, m]`. Empty slots are zeros."""
    buffer = tokens.new_zeros(num_experts * capacity + 1, tokens.shape[1])
    for choice in rows:
        buffer = buffer.index_copy(0, choice, tokens)
    return buffer[:-1].view(num_experts, capacity, -1)


def _sparse_decode(outputs: Tensor, rows: Tensor, weights: Tensor, num_tokens: int) -> Tensor:
    """Return the weighted sum `[s, m]` of each token's rows of `outputs` `[e * c, m]`; a dropped choice adds zero."""
    padded = torch.cat([outputs, outputs.new_zeros(1, outputs.shape[1])])
    total = torch.zeros(num_tokens, outputs.shape[1], device=outputs.device)  # fp32, as the weights
    for choice, weight in zip(rows, weights, strict=True):
        total = total + padded[choice] * weight.unsqueeze(1)
    return total.to(outputs.dtype)
