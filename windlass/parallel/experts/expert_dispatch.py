"""Dispatch of tokens to the ranks of their experts, and combination of the outputs."""

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
"""Function that runs the local experts. It maps rows `[rows, hidden]`, sorted by expert, and the number of rows of each
local expert to output rows `[rows, hidden]`.
"""


def compute_expert_spans(num_experts: int, axis: MeshAxis) -> list[tuple[int, int]]:
    """Return the range `[first, end)` of the experts on each rank of the axis."""
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
    """Send each token to its experts, and sum the expert outputs by weight.

    Collective along `axis` in forward and backward, independent of the routing: a rank whose experts receive no rows
    runs them on zero rows. Received rows are sorted by expert, then by source rank, then by token.
    Synchronizes with the device once, to read the counts. On an axis of one rank with `dropless`, only
    `run_local_experts` may synchronize.

    Args:
        hidden: `[tokens, hidden]`, this rank's tokens.
        index: `[tokens, k]`, integers: the global expert number of each of a token's k slots; `num_experts` or more for
            an unused slot.
        weights: `[tokens, k]`, weights of the expert outputs.
        num_experts: number of experts on all ranks.
        run_local_experts: computes this rank's experts.
        dropless: True if every slot has an expert.

    Returns:
        `[tokens, hidden]` in the dtype of `hidden`; zeros for a token without an expert.
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
    """Return the expert output rows of this rank's tokens, in the order of sorted slots. Collective along `axis`."""
    spans = compute_expert_spans(num_experts, axis)
    here = spans[axis.index][1] - spans[axis.index][0]
    slots = permutation.sorted_slots.shape[0]
    arriving, all_counts = axis.exchange_counts(permutation.tokens_per_expert, spans, slots)
    sends = [sum(all_counts[first:end]) for first, end in spans]
    received_counts = [
        all_counts[num_experts + rank * here : num_experts + (rank + 1) * here] for rank in range(axis.size)
    ]
    receives = [sum(counts) for counts in received_counts]
    groups = RowGroups(
        arriving.view(axis.size, here).sum(0), [sum(counts) for counts in zip(*received_counts, strict=True)]
    )
    rows = all_to_all(permute_tokens(hidden, permutation, sum(sends)), axis, sends, receives)
    if here == 1:  # all received rows are for the same expert
        return all_to_all(run_local_experts(rows, groups), axis, receives, sends)
    numbers = torch.arange(here, device=rows.device).repeat(axis.size)
    by_expert = torch.sort(numbers.repeat_interleave(arriving, output_size=rows.shape[0]), stable=True).indices
    back = torch.empty_like(by_expert)
    back[by_expert] = torch.arange(rows.shape[0], device=rows.device)
    found = run_local_experts(reorder_rows(rows, by_expert, back), groups)
    return all_to_all(reorder_rows(found, back, by_expert), axis, receives, sends)
