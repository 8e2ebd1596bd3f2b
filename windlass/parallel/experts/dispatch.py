"""Tokens to the ranks of their experts, through these, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from windlass.comm.axis import Axis
from windlass.parallel.exchanges import swap
from windlass.parallel.experts.grouped import Groups
from windlass.parallel.experts.order import Order, collect_rows, order_of, permute_rows, spread_rows
from windlass.parallel.placement import spread

LocalExperts = Callable[[torch.Tensor, Groups], torch.Tensor]
"""Rows `[rows, hidden]` sorted by expert and how many belong to each expert here, to rows `[rows, hidden]`."""


def spans_of(experts: int, axis: Axis) -> list[tuple[int, int]]:
    """`[first, end)` of the experts that each rank of the axis has."""
    return [spread(experts, axis.size, rank) for rank in range(axis.size)]


def dispatch(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    *,
    experts: int,
    axis: Axis,
    local: LocalExperts,
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
    order = order_of(index, experts)
    if axis.size == 1:
        sizes = None if dropless else order.counts.tolist()
        rows = spread_rows(hidden, order, index.numel() if sizes is None else sum(sizes))
        found = local(rows, Groups(order.counts, sizes))
    else:
        found = _far(hidden, order, experts, axis, local)
    return collect_rows(found, weights, order).to(hidden.dtype)


def _far(hidden: torch.Tensor, order: Order, experts: int, axis: Axis, local: LocalExperts) -> torch.Tensor:
    """Rows by slot order, as the experts of all ranks made them."""
    spans = spans_of(experts, axis)
    here = spans[axis.index][1] - spans[axis.index][0]
    arriving = axis.all_to_all(order.counts, [end - first for first, end in spans], [here] * axis.size)
    told: list[int] = torch.cat([order.counts, arriving]).tolist()  # the one wait for the device
    sends = [sum(told[first:end]) for first, end in spans]
    heard = [told[experts + rank * here : experts + (rank + 1) * here] for rank in range(axis.size)]
    receives = [sum(counts) for counts in heard]
    groups = Groups(arriving.view(axis.size, here).sum(0), [sum(counts) for counts in zip(*heard, strict=True)])
    rows = swap(spread_rows(hidden, order, sum(sends)), axis, sends, receives)
    if here == 1:  # what comes from different ranks is for the same expert
        return swap(local(rows, groups), axis, receives, sends)
    numbers = torch.arange(here, device=rows.device).repeat(axis.size)
    by_expert = torch.sort(numbers.repeat_interleave(arriving, output_size=rows.shape[0]), stable=True).indices
    back = torch.empty_like(by_expert)
    back[by_expert] = torch.arange(rows.shape[0], device=rows.device)
    found = local(permute_rows(rows, by_expert, back), groups)
    return swap(permute_rows(found, back, by_expert), axis, receives, sends)
