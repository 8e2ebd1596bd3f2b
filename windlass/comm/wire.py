"""The transports over torch.distributed: gloo by pairwise exchange, nccl by its own collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist

from windlass.base.pending import DONE, Pending, Step
from windlass.comm.groups import Group
from windlass.comm.ordered_sum import ordered_sum, sum_of_squares
from windlass.comm.traffic import Traffic
from windlass.comm.transport import Buffer, Need, cut


class _Wire:
    """What both have in common: private buffers, and nothing to settle since a collective ends when it was read."""

    name = "wire"

    def __init__(self, group: Group, chunk: int) -> None:
        self.group, self.traffic = group, Traffic()
        self._chunk = chunk
        self._tag = 0

    def _next_tag(self) -> int:
        """A tag for one operation, equal on all ranks since they start operations in one order."""
        self._tag = (self._tag + 1) % (1 << 20)
        return self._tag

    def allocate(self, needs: list[Need], device: torch.device) -> list[Buffer]:
        return [Buffer(torch.zeros(n.numel, dtype=n.dtype, device=device)) for n in needs]

    def settle(self, buffer: Buffer) -> None:
        return

    def publish(self, buffer: Buffer) -> None:
        return

    def _count(self, operation: str, elements: int, numel: int, itemsize: int) -> None:
        others = (self.group.size - 1) * numel // self.group.size
        self.traffic.add(operation, elements if self.group.size > 1 else 0, others * itemsize)


class GlooTransport(_Wire):
    """Each pair of ranks exchanges exactly the cuts that the other owns.

    Gloo's own reduce-scatter moves twice the bytes that its all-reduce does; a pairwise exchange and an ordered sum
    move (size - 1) / size of the buffer and give every transport the same bits.

    Args:
        group: the ranks.
        chunk: elements of a buffer that travel at once; bounds the receive buffers.
    """

    name = "gloo"

    def reduce(
        self, buffer: Buffer, out: torch.Tensor, *, add: bool, factor: float, elements: int, wire: torch.dtype
    ) -> GlooReduction:
        self._count("reduce", elements, buffer.local.numel(), wire.itemsize)
        return GlooReduction(self.group, buffer.local, out, add, factor, wire, self._chunk, self._next_tag())

    def gather(self, buffer: Buffer, *, elements: int) -> Pending:
        group = self.group
        if group.size == 1:
            return DONE
        self._count("gather", elements, buffer.local.numel(), buffer.local.element_size())
        works: list[dist.Work] = []
        own, tag = cut(buffer.local, group.index, group.size), self._next_tag()
        for index, rank in enumerate(group.ranks):
            if index != group.index:
                works.append(_receive(cut(buffer.local, index, group.size), rank, group, tag))
                works.append(_send(own, rank, group, tag))
        return Step(None, lambda: _wait(works), lambda: None)


class GlooReduction:
    """A pairwise exchange under way, chunk by chunk, and the ordered sum at its end."""

    def __init__(
        self,
        group: Group,
        flat: torch.Tensor,
        out: torch.Tensor,
        add: bool,
        factor: float,
        wire: torch.dtype,
        chunk: int,
        tag: int,
    ) -> None:
        self.squares: torch.Tensor | None = None
        self._group, self._flat, self._out, self._tag = group, flat, out, tag
        self._add, self._factor, self._wire = add, factor, wire
        self._span = max(1, min(out.numel(), chunk // group.size))
        self._works: list[dist.Work] = []
        self._parts: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []  # what is being sent must live until it was
        self._step = Step(self._ready, lambda: None, self._finish)
        self._start(0)

    def poll(self) -> bool:
        return self._step.poll()

    def wait(self) -> None:
        self._step.wait()

    def _ready(self) -> bool:
        return self._span >= self._out.numel() and all(work.is_completed() for work in self._works)

    def _start(self, begin: int) -> None:
        group = self._group
        end = min(begin + self._span, self._out.numel())
        self._works, self._parts, self._kept = [], [], []
        for index, rank in enumerate(group.ranks):
            theirs = cut(self._flat, index, group.size)[begin:end].to(self._wire)
            if index == group.index:
                self._parts.append(theirs)
                continue
            incoming = torch.empty_like(theirs)
            self._parts.append(incoming)
            self._kept.append(theirs)
            self._works.append(_receive(incoming, rank, group, self._tag))
            self._works.append(_send(theirs, rank, group, self._tag))

    def _finish(self) -> None:
        begin, squares = 0, torch.zeros((), dtype=torch.float64)
        while True:
            _wait(self._works)
            end = min(begin + self._span, self._out.numel())
            measured = ordered_sum(
                self._parts, self._out[begin:end], add=self._add, factor=self._factor, measure=True
            )
            squares = squares + measured if measured is not None else squares
            begin = end
            if begin >= self._out.numel():
                break
            self._start(begin)
        self._works, self._parts, self._kept = [], [], []
        self.squares = squares


class NcclTransport(_Wire):
    """NCCL's reduce-scatter and all-gather, which run on its own stream from the moment they are started."""

    name = "nccl"

    def reduce(
        self, buffer: Buffer, out: torch.Tensor, *, add: bool, factor: float, elements: int, wire: torch.dtype
    ) -> NcclReduction:
        self._count("reduce", elements, buffer.local.numel(), wire.itemsize)
        return NcclReduction(self.group, buffer.local, out, add, factor, wire)

    def gather(self, buffer: Buffer, *, elements: int) -> Pending:
        group = self.group
        if group.size == 1:
            return DONE
        self._count("gather", elements, buffer.local.numel(), buffer.local.element_size())
        own = cut(buffer.local, group.index, group.size)
        work = dist.all_gather_into_tensor(buffer.local, own, group=group.process_group, async_op=True)
        return Step(None, lambda: _wait([work]), lambda: None)


class NcclReduction:
    """A reduce-scatter under way; the sum lies in a buffer of its own until it is scaled into `out`."""

    def __init__(
        self, group: Group, flat: torch.Tensor, out: torch.Tensor, add: bool, factor: float, wire: torch.dtype
    ) -> None:
        self.squares: torch.Tensor | None = None
        self._out, self._add, self._factor = out, add, factor
        sent = flat.to(wire)
        self._work: dist.Work | None = None
        if group.size == 1:
            self._sum = sent
        else:
            self._sum = torch.empty(out.numel(), dtype=wire, device=out.device)
            self._work = dist.reduce_scatter_tensor(self._sum, sent, group=group.process_group, async_op=True)
        self._step = Step(None, self._block, self._finish)

    def poll(self) -> bool:
        return self._step.poll()

    def wait(self) -> None:
        self._step.wait()

    def _block(self) -> None:
        if self._work is not None:
            self._work.wait()

    def _finish(self) -> None:
        if self._add:
            self._out.add_(self._sum, alpha=self._factor)
        elif self._sum.data_ptr() != self._out.data_ptr():
            torch.mul(self._sum, self._factor, out=self._out)
        elif self._factor != 1.0:
            self._out.mul_(self._factor)
        self.squares = sum_of_squares(self._out)
        del self._sum


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)  # gloo has no bfloat16; bytes travel all the same


def _send(tensor: torch.Tensor, rank: int, group: Group, tag: int) -> dist.Work:
    work = dist.isend(_bytes(tensor), rank, group=group.process_group, tag=tag)
    assert work is not None
    return work


def _receive(tensor: torch.Tensor, rank: int, group: Group, tag: int) -> dist.Work:
    work = dist.irecv(_bytes(tensor), rank, group=group.process_group, tag=tag)
    assert work is not None
    return work


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
