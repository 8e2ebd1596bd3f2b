"""Tensors on their way round a ring, while the rank computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from windlass.base.activity import During
from windlass.comm.axis import Axis


class Passing:
    """Tensors that are being sent `by` places further along the axis, and those that come in their place, as large.

    `Axis.pass_on`, in two halves. The tensors sent are kept until `wait` returns and must not change before.
    """

    def __init__(self, axis: Axis, tensors: Sequence[torch.Tensor], by: int) -> None:
        self._axis, self._sent = axis, [tensor.contiguous() for tensor in tensors]
        self._works: list[dist.Work] = []
        if by % axis.size == 0:
            self._received = self._sent
            return
        self._received = [torch.empty_like(tensor) for tensor in self._sent]
        ranks, group = axis.group.ranks, axis.group.process_group
        to, source = ranks[(axis.index + by) % axis.size], ranks[(axis.index - by) % axis.size]
        operations = [dist.P2POp(dist.isend, _bytes(tensor), to, group) for tensor in self._sent]
        operations += [dist.P2POp(dist.irecv, _bytes(tensor), source, group) for tensor in self._received]
        self._works = dist.batch_isend_irecv(operations)
        axis.traffic.add("pass_on", 0, sum(tensor.nbytes for tensor in self._received))

    def wait(self) -> list[torch.Tensor]:
        """What came; later work of the current stream sees it."""
        with During(f"a pass along {self._axis.name}"):
            for work in self._works:
                work.wait()
        self._works, self._sent = [], []
        return self._received


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
