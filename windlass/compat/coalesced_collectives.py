"""Module `deepspeed.runtime.comm.coalesced_collectives`: reduce-scatter of several tensors in one collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from windlass.compat.collectives import reduce_scatter_fn


@torch.no_grad()
def reduce_scatter_coalesced(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """Return this rank's part of each tensor's mean over ranks, flat. Collective.

    A tensor of n elements is split into parts of ceil(n / ranks); the last parts are shorter or empty.

    Args:
        tensors: tensors of one dtype and device, with the same shapes on every rank.
        group: process group; None means all ranks.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [-(-tensor.numel() // ranks) for tensor in tensors]
    # Row r holds part r of every tensor, padded with zeros, so that one reduce-scatter serves all tensors.
    rows = tensors[0].new_zeros(ranks, sum(sizes))
    for tensor, size, columns in zip(tensors, sizes, rows.split(sizes, dim=1), strict=True):
        flat = tensor.detach().reshape(-1)
        for index in range(ranks):
            part = flat[index * size : (index + 1) * size]
            columns[index, : part.numel()].copy_(part)
    output = torch.empty_like(rows[0])
    reduce_scatter_fn(output, rows.div_(ranks).reshape(-1), group=group)
    found = []
    for tensor, part, size in zip(tensors, output.split(sizes), sizes, strict=True):
        count = min(max(tensor.numel() - rank * size, 0), size)
        found.append(part[:count])
    return found
