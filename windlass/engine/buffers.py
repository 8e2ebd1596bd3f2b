"""Keeps module buffers (running statistics) equal on all ranks, by DistributedDataParallel's rule: rank 0's count."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from windlass.comm.groups import Group
from windlass.parallel.experts import is_bias


class Buffers:
    """The buffers of a model. They are sent at the first training forward after a step, if anyone changed one.

    Args:
        model: whose buffers.
        data: the ranks that share them.
        device: where they shall be.
        dtype: floating-point buffers that belong to the saved state are cast to it (a norm computes in one dtype);
            the others (tables of positions) and biases of balanced routers keep their precision. None: all keep theirs.
        meet: waits until all ranks are about to send, and serves those that run a forward alone meanwhile.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Group,
        device: torch.device,
        dtype: torch.dtype | None,
        meet: Callable[[], None],
    ) -> None:
        self._model, self._data, self._meet = model, data, meet
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                stays = name in module._non_persistent_buffers_set or is_bias(module, name)
                cast = dtype is not None and buffer.is_floating_point() and not stays
                module._buffers[name] = buffer.to(device=device, dtype=dtype if cast else None)
        self._seen: list[tuple[int, int]] = []
        self._stale = False
        self.send()

    def changed(self) -> bool:
        """Whether this rank's buffers changed since they were last equal."""
        return self._state() != self._seen

    def changed_alike(self) -> None:
        """What changed since `changed` was asked did so on all ranks: there is nothing to send."""
        self._seen = self._state()

    def invalidate(self) -> None:
        """Some rank's buffers changed: send them before the next training forward."""
        self._stale = True

    def before_forward(self) -> None:
        """Send rank 0's, if that is due. Collective then, and due on all ranks alike."""
        if self._stale:
            self._meet()
            self.send()

    def send(self) -> None:
        """Make all buffers equal to rank 0's. Collective."""
        kinds: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in self._model.buffers():
            kinds.setdefault(buffer.dtype, []).append(buffer)
        if self._data.size > 1:
            for buffers in kinds.values():
                flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
                dist.broadcast(flat.view(torch.uint8), self._data.ranks[0], group=self._data.process_group)
                with torch.no_grad():
                    for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                        buffer.copy_(part.view(buffer.shape))
        self._stale = False
        self._seen = self._state()

    def _state(self) -> list[tuple[int, int]]:
        return [(id(buffer), buffer._version) for buffer in self._model.buffers()]
