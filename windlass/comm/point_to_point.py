"""Point-to-point transfers of a group, started together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from windlass.comm.rank_group import RankGroup

IndexedTensors = Sequence[tuple[int, torch.Tensor]]  # pairs of a peer's group index and a tensor


def exchange_tensors(group: RankGroup, sends: IndexedTensors, receives: IndexedTensors) -> int:
    """Send and receive contiguous tensors, and return the bytes received. Collective.

    Args:
        group: Group to which the indices refer.
        sends: Group index of the receiver, and the tensor. Tensors for one receiver arrive in this order.
        receives: Group index of the sender, and the target tensor, in the sender's order.
    """
    wait_for_transfers(start_exchange(group, sends, receives))
    return sum(t.numel() * t.element_size() for _, t in receives)


def start_exchange(
    group: RankGroup, sends: IndexedTensors, receives: IndexedTensors, *, tag: int = 0, on_cpu: bool = False
) -> list[Any]:
    """Start the transfers of `exchange_tensors` without waiting. Return their operations, for `wait_for_transfers`.

    Before the operations end, no tensor may be freed, and tensors that are sent may not be changed.

    Args:
        tag: Tag of the messages, equal on both sides. NCCL ignores it and matches messages by order.
        on_cpu: The tensors are on the CPU: use `group.cpu_group` instead of `group.process_group`.
    """
    # All transfers start together: separate sends and receives would deadlock if all ranks send first.
    process_group = group.cpu_group if on_cpu else group.process_group
    operations = [
        # Send bytes, because gloo does not support every dtype.
        dist.P2POp(operation, as_bytes(tensor), group.ranks[index], process_group, tag)
        for operation, transfers in ((dist.isend, sends), (dist.irecv, receives))
        for index, tensor in transfers
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as uint8 `[bytes]`."""
    # A tensor of one element may have any stride, and torch then refuses a view of its bytes.
    return tensor.detach().view(-1).as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def wait_for_transfers(works: Iterable[Any]) -> None:
    """Wait until operations of `start_exchange` end. On an accelerator, only the current stream waits for them."""
    # This wait is in `comm`, where the hang report recognizes it: see [Note: collectives start in comm].
    for work in works:
        work.wait()
