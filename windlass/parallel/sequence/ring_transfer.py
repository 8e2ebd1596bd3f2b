"""Asynchronous transfer of tensors round a ring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from windlass.base.collective_activity import WaitScope
from windlass.comm.mesh_axis import MeshAxis


class RingTransfer:
    """Transfer to the rank `shift` places further along the axis, and from the rank `shift` places before.

    The received tensors have the shapes of the sent ones. The sent tensors are kept until `wait` returns and must not
    change before. This is `MeshAxis.pass_on` split into start and wait.
    """

    def __init__(self, axis: MeshAxis, tensors: Sequence[torch.Tensor], shift: int) -> None:
        self._axis, self._send_buffers = axis, [tensor.contiguous() for tensor in tensors]
        self._works: list[dist.Work] = []
        if shift % axis.size == 0:
            self._receive_buffers = self._send_buffers
            return
        self._receive_buffers = [torch.empty_like(tensor) for tensor in self._send_buffers]
        ranks, group = axis.group.ranks, axis.group.process_group
        to, source = ranks[(axis.index + shift) % axis.size], ranks[(axis.index - shift) % axis.size]
        operations = [dist.P2POp(dist.isend, _as_bytes(tensor), to, group) for tensor in self._send_buffers]
        operations += [dist.P2POp(dist.irecv, _as_bytes(tensor), source, group) for tensor in self._receive_buffers]
        self._works = dist.batch_isend_irecv(operations)
        axis.traffic.add("pass_on", 0, sum(tensor.nbytes for tensor in self._receive_buffers))

    def wait(self) -> list[torch.Tensor]:
        """Return the received tensors, ready for later work on the current stream."""
        with WaitScope(f"a pass along {self._axis.name}"):
            for work in self._works:
                work.wait()
        self._works, self._send_buffers = [], []
        return self._receive_buffers


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
