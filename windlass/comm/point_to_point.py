"""Point-to-point transfers of a group, started together."""

from __future__ import annotations

import torch
import torch.distributed as dist

from windlass.comm.rank_group import RankGroup


def exchange_tensors(
    group: RankGroup, sends: list[tuple[int, torch.Tensor]], receives: list[tuple[int, torch.Tensor]]
) -> int:
    """Send and receive contiguous tensors, and return the bytes received. Collective.

    Args:
        group: The ranks.
        sends: Group index of the receiver, and the tensor. Tensors for one receiver arrive in this order.
        receives: Group index of the sender, and the target tensor, in the sender's order.
    """
    # Sent as bytes, because gloo does not support every dtype.
    operations = [dist.P2POp(dist.isend, t.view(torch.uint8), group.ranks[i], group.process_group) for i, t in sends]
    operations += [
        dist.P2POp(dist.irecv, t.view(torch.uint8), group.ranks[i], group.process_group) for i, t in receives
    ]
    # Started together: one transfer after the other would deadlock if all ranks send first.
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return sum(t.numel() * t.element_size() for _, t in receives)
