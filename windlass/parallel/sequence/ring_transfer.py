"""Asynchronous transfer of tensors round a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from windlass.base.collective_activity import WaitScope
from windlass.comm.mesh_axis import MeshAxis
from windlass.comm.point_to_point import start_exchange, wait_for_transfers


class RingTransfer:
    """Transfer to the rank `shift` places further along the axis, and from the rank `shift` places before.

    The received tensors have the shapes of the sent ones. The sent tensors are kept until `wait` returns and must not
    change before. This is `MeshAxis.pass_on` split into start and wait.
    """

    def __init__(self, axis: MeshAxis, tensors: Sequence[torch.Tensor], shift: int) -> None:
        self._axis, self._send_buffers = axis, [tensor.contiguous() for tensor in tensors]
        self._works: list[Any] = []
        if shift % axis.size == 0:
            self._receive_buffers = self._send_buffers
            return
        self._receive_buffers = [torch.empty_like(tensor) for tensor in self._send_buffers]
        to, source = (axis.index + shift) % axis.size, (axis.index - shift) % axis.size
        self._works = start_exchange(
            axis.group,
            [(to, tensor) for tensor in self._send_buffers],
            [(source, tensor) for tensor in self._receive_buffers],
        )
        axis.traffic.add("pass_on", 0, sum(tensor.nbytes for tensor in self._receive_buffers))

    def wait(self) -> list[torch.Tensor]:
        """Return the received tensors, ready for later work on the current stream."""
        with WaitScope(f"a pass along {self._axis.name}"):
            wait_for_transfers(self._works)
        self._works, self._send_buffers = [], []
        return self._receive_buffers
