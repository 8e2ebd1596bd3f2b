"""The transport of CPU ranks on one host: they read each other's buffers where they lie."""

from __future__ import annotations

from datetime import timedelta

import torch

from windlass.base.pending import DONE, Pending, Step
from windlass.comm.groups import Group
from windlass.comm.ordered_sum import ordered_sum
from windlass.comm.shared_memory import Counters, SharedMemory
from windlass.comm.traffic import Traffic
from windlass.comm.transport import Buffer, Need, cut

_ALIGN = 64
_COUNTERS = 4  # for each buffer: offered and taken of reduce, offered and taken of share


class ShmTransport:
    """One-sided: an operation needs its peers to have offered their part, not to take part at the same moment.

    Each buffer has two pairs of counters. A rank raises `offered` once its part may be read and `taken` once it has
    read the others'; whoever wants to write the buffer again waits for its peers' `taken` (`settle`).
    """

    name = "shm"

    def __init__(self, group: Group, timeout: timedelta) -> None:
        self.group, self.traffic = group, Traffic()
        self._timeout = timeout
        self._counters: list[Counters] = []

    def allocate(self, needs: list[Need], device: torch.device) -> list[Buffer]:
        """Buffers in shared memory, zeroed; those with `common` exist once. Collective."""
        own = _sizes([n for n in needs if not n.common])
        common = _sizes([n for n in needs if n.common])
        memory = SharedMemory(self.group, own[-1])
        # the common block lies in the first rank's memory; the others contribute an empty one
        shared = SharedMemory(self.group, common[-1] if self.group.index == 0 else 1) if common[-1] else None
        self._counters.append(Counters(self.group, _COUNTERS * max(len(needs), 1), self._timeout))
        buffers: list[Buffer] = []
        starts = {False: iter(own), True: iter(common)}
        for number, need in enumerate(needs):
            start = next(starts[need.common])
            size = need.numel * need.dtype.itemsize
            blocks = memory.blocks if not need.common else [shared.blocks[0]] * self.group.size  # type: ignore[union-attr]
            parts = [block[start : start + size].view(need.dtype) for block in blocks]
            key = (len(self._counters) - 1) << 32 | number
            buffers.append(Buffer(parts[self.group.index], parts, need.common, key))
        return buffers

    def reduce(
        self, buffer: Buffer, out: torch.Tensor, *, add: bool, factor: float, elements: int, wire: torch.dtype
    ) -> ShmReduction:
        return ShmReduction(self, buffer, out, add, factor, elements, wire)

    def publish(self, buffer: Buffer) -> None:
        self.offer(buffer, "gather")

    def gather(self, buffer: Buffer, *, elements: int) -> Pending:
        if self.group.size == 1:
            return DONE
        turn = buffer.rounds.get("gather", 0)

        def read() -> None:
            size, moved = self.group.size, 0
            for index, part in enumerate(buffer.parts):
                if index != self.group.index and not buffer.common:
                    theirs = cut(part, index, size)
                    cut(buffer.local, index, size).copy_(theirs)
                    moved += theirs.numel() * theirs.element_size()
            self.taken(buffer, "gather", turn)
            self.traffic.add("gather", elements, moved)

        return Step(
            lambda: self.reached(buffer, "gather", turn), lambda: self.wait(buffer, "gather", turn, "a gather"), read
        )

    def settle(self, buffer: Buffer) -> None:
        for operation in ("reduce", "gather"):
            turn = buffer.rounds.get(operation, 0)
            if turn:
                counters, base = self._place(buffer, operation)
                counters.wait(base + 1, turn, "the release of a buffer")

    def offer(self, buffer: Buffer, operation: str) -> int:
        """Say that this rank's part may be read; returns the turn that peers must have offered too."""
        turn = buffer.rounds.get(operation, 0) + 1
        buffer.rounds[operation] = turn
        counters, base = self._place(buffer, operation)
        counters.raise_to(base, turn)
        return turn

    def taken(self, buffer: Buffer, operation: str, turn: int) -> None:
        """Say that this rank has read what its peers offered."""
        counters, base = self._place(buffer, operation)
        counters.raise_to(base + 1, turn)

    def reached(self, buffer: Buffer, operation: str, turn: int) -> bool:
        counters, base = self._place(buffer, operation)
        return counters.reached(base, turn)

    def wait(self, buffer: Buffer, operation: str, turn: int, what: str) -> None:
        counters, base = self._place(buffer, operation)
        counters.wait(base, turn, what)

    def _place(self, buffer: Buffer, operation: str) -> tuple[Counters, int]:
        number = buffer.key & 0xFFFFFFFF
        return self._counters[buffer.key >> 32], _COUNTERS * number + (0 if operation == "reduce" else 2)


class ShmReduction:
    """A reduction whose sum is computed here once all peers have offered their parts."""

    def __init__(
        self,
        transport: ShmTransport,
        buffer: Buffer,
        out: torch.Tensor,
        add: bool,
        factor: float,
        elements: int,
        wire: torch.dtype,
    ) -> None:
        self.squares: torch.Tensor | None = None
        self._transport, self._buffer, self._out = transport, buffer, out
        self._add, self._factor, self._elements, self._wire = add, factor, elements, wire
        self._turn = transport.offer(buffer, "reduce")
        self._step = Step(self._ready, self._block, self._finish)

    def poll(self) -> bool:
        return self._step.poll()

    def wait(self) -> None:
        self._step.wait()

    def _ready(self) -> bool:
        return self._transport.reached(self._buffer, "reduce", self._turn)

    def _block(self) -> None:
        self._transport.wait(self._buffer, "reduce", self._turn, "a gradient reduction")

    def _finish(self) -> None:
        group = self._transport.group
        parts = [cut(part, group.index, group.size) for part in self._buffer.parts]
        if self._wire != parts[0].dtype:
            parts = [part.to(self._wire) for part in parts]
        self.squares = ordered_sum(parts, self._out, add=self._add, factor=self._factor, measure=True)
        self._transport.taken(self._buffer, "reduce", self._turn)
        others = (group.size - 1) * self._out.numel()
        self._transport.traffic.add("reduce", self._elements if group.size > 1 else 0, others * self._wire.itemsize)


def _sizes(needs: list[Need]) -> list[int]:
    """Where each need starts in a block, in bytes, and last the size of the block."""
    starts, end = [], 0
    for need in needs:
        starts.append(end)
        end += -(-need.numel * need.dtype.itemsize // _ALIGN) * _ALIGN
    return [*starts, end]
