"""Byte channels: transfers of bytes between the ranks of a group, for compressed collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.distributed as dist

from windlass.base.collective_activity import WaitScope
from windlass.comm.mesh_axis import run_pending_checks
from windlass.comm.point_to_point import start_exchange, wait_for_transfers
from windlass.comm.rank_group import RankGroup


class ByteChannel(Protocol):
    """Transfers of uint8 tensors over one group.

    Sender and receiver pass tensors of the same size. Messages between two ranks arrive in the order of their sends.
    `exchange`, `all_gather` and `broadcast` block until outgoing tensors may be written again and incoming tensors are
    complete (on a GPU: in the order of the current stream).
    """

    name: str
    group: RankGroup

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        """Send one tensor to each of some peers, and receive one tensor from each of some peers.

        Args:
            sends, receives: contiguous uint8 tensors by group index of the peer. Empty tensors are not transferred.
        """
        ...

    def start_exchange(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> Callable[[], None]:
        """Start an `exchange`, and return a function that waits for its end. Some channels block in this call until the
        exchange has ended.

        All ranks start the same exchanges in the same order, because messages in flight are matched by this order.
        """
        ...

    def all_gather(self, own: torch.Tensor, receives: Mapping[int, torch.Tensor]) -> None:
        """Send `own` to every peer and receive the tensor of every peer. Collective.

        Args:
            own: contiguous uint8 tensor; its size may differ between ranks.
            receives: one tensor for each peer, by its group index.
        """
        ...

    def start_all_gather(self, own: torch.Tensor, receives: Mapping[int, torch.Tensor]) -> Callable[[], None]:
        """Start an `all_gather`, and return a function that waits for its end. Collective."""
        ...

    def broadcast(self, message: torch.Tensor, source: int) -> None:
        """Copy `message` of the rank with group index `source` to `message` of all others. Collective."""
        ...


class ProcessGroupChannel:
    """Channel over a process group of torch.distributed: gloo for CPU tensors, NCCL for GPU tensors, or MPI for both.

    Args:
        group: ranks that communicate.
        what: name of the group in reports of the watchdog.
    """

    def __init__(self, group: RankGroup, what: str = "a process group") -> None:
        self.group, self._what = group, f"a compressed collective over {what}"
        self.name = "alone" if group.size == 1 else str(dist.get_backend(group.process_group))

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        self.start_exchange(sends, receives)()

    def start_exchange(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> Callable[[], None]:
        run_pending_checks()
        # The size is the same at both ends, so both leave out an empty message.
        outgoing = [(peer, tensor) for peer, tensor in sends.items() if tensor.numel()]
        incoming = [(peer, tensor) for peer, tensor in receives.items() if tensor.numel()]
        with WaitScope(self._what):
            works = start_exchange(self.group, outgoing, incoming)

        def wait(_: object = (outgoing, incoming)) -> None:  # the default keeps the tensors until the transfers end
            with WaitScope(self._what):
                wait_for_transfers(works)

        return wait

    def all_gather(self, own: torch.Tensor, receives: Mapping[int, torch.Tensor]) -> None:
        self.exchange(dict.fromkeys(receives, own), receives)

    def start_all_gather(self, own: torch.Tensor, receives: Mapping[int, torch.Tensor]) -> Callable[[], None]:
        return self.start_exchange(dict.fromkeys(receives, own), receives)

    def broadcast(self, message: torch.Tensor, source: int) -> None:
        run_pending_checks()
        if message.numel():
            with WaitScope(self._what):
                dist.broadcast(message, self.group.ranks[source], group=self.group.process_group)
