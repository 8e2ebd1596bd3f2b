"""Tokens to the ranks of their experts, through these, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.autograd_collectives import all_to_all
from windlass.parallel.experts.grouped_linear import RowGroups
from windlass.parallel.experts.token_permutation import (
    TokenPermutation,
    permute_tokens,
    reorder_rows,
    sort_by_expert,
    unpermute_tokens,
)
from windlass.parallel.placement import compute_shard_range

RunLocalExperts = Callable[[torch.Tensor, RowGroups], torch.Tensor]
"""Rows `[rows, hidden]` sorted by expert and how many belong to each expert here, to rows `[rows, hidden]`."""


def compute_expert_spans(num_experts: int, axis: MeshAxis) -> list[tuple[int, int]]:
    """`[first, end)` of the experts that each rank of the axis has."""
    return [compute_shard_range(num_experts, axis.size, rank) for rank in range(axis.size)]


def dispatch_and_combine(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    *,
    num_experts: int,
    axis: MeshAxis,
    run_local_experts: RunLocalExperts,
    dropless: bool = False,
) -> torch.Tensor:
    """Each token through its experts, wherever they are; their outputs are added up by weight.

    Collective along `axis`, forward and backward, whatever the ranks' tokens chose: a rank whose experts get no row
    runs them on none. What comes here is sorted by expert, then by the rank it came from, then as it was there. Waits
    for the device once, for the counts; not at all on an axis of one rank if no slot is unused and `local` doesn't.

    Args:
        hidden: `[tokens, hidden]`, this rank's.
        index: `[tokens, k]`, integers: each slot's expert, counted over all ranks; `experts` or more: nobody.
        weights: `[tokens, k]`, of the experts' outputs.
        experts: how many there are on all ranks together.
        local: this rank's experts.
        dropless: every slot has an expert.

    Returns:
        `[tokens, hidden]` in the dtype of `hidden`; zeros for a token of no expert.
    """
    order = sort_by_expert(index, num_experts)
    if axis.size == 1:
        sizes = None if dropless else order.tokens_per_expert.tolist()
        rows = permute_tokens(hidden, order, index.numel() if sizes is None else sum(sizes))
        found = run_local_experts(rows, RowGroups(order.tokens_per_expert, sizes))
    else:
        found = _dispatch_remote(hidden, order, num_experts, axis, run_local_experts)
    return unpermute_tokens(found, weights, order).to(hidden.dtype)


def _dispatch_remote(
    hidden: torch.Tensor,
    permutation: TokenPermutation,
    num_experts: int,
    axis: MeshAxis,
    run_local_experts: RunLocalExperts,
) -> torch.Tensor:
    """Rows by slot order, as the experts of all ranks made them."""
    spans = compute_expert_spans(num_experts, axis)
    here = spans[axis.index][1] - spans[axis.index][0]
    arriving = axis.all_to_all(permutation.tokens_per_expert, [end - first for first, end in spans], [here] * axis.size)
    told: list[int] = torch.cat([permutation.tokens_per_expert, arriving]).tolist()  # the one wait for the device
    sends = [sum(told[first:end]) for first, end in spans]
    heard = [told[num_experts + rank * here : num_experts + (rank + 1) * here] for rank in range(axis.size)]
    receives = [sum(counts) for counts in heard]
    groups = RowGroups(arriving.view(axis.size, here).sum(0), [sum(counts) for counts in zip(*heard, strict=True)])
    rows = all_to_all(permute_tokens(hidden, permutation, sum(sends)), axis, sends, receives)
    if here == 1:  # what comes from different ranks is for the same expert
        return all_to_all(run_local_experts(rows, groups), axis, receives, sends)
    numbers = torch.arange(here, device=rows.device).repeat(axis.size)
    by_expert = torch.sort(numbers.repeat_interleave(arriving, output_size=rows.shape[0]), stable=True).indices
    back = torch.empty_like(by_expert)
    back[by_expert] = torch.arange(rows.shape[0], device=rows.device)
    found = run_local_experts(reorder_rows(rows, by_expert, back), groups)
    return all_to_all(reorder_rows(found, back, by_expert), axis, receives, sends)
