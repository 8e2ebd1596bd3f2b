"""Shared-memory transport for CPU ranks on one host: ranks read each other's buffers directly."""

from __future__ import annotations

from datetime import timedelta

import torch

from windlass.base.pending import DONE, ChainedPending, FinishingPending, Pending
from windlass.comm import agreement_board
from windlass.comm.agreement_board import SharedMemoryBoard
from windlass.comm.anonymous_pages import AnonymousPages
from windlass.comm.gather_windows import COUNTERS, WINDOWS, GatherWindows
from windlass.comm.ordered_sum import ordered_sum
from windlass.comm.rank_group import RankGroup
from windlass.comm.shared_memory import Counters, SharedMemory
from windlass.comm.traffic import Traffic
from windlass.comm.transport import BufferRequest, TransportBuffer, local_shard

_ALIGN = 64
_PER_BUFFER = 2  # counters: published, gathered
_PER_LANE = 3  # counters: offered, taken, and ring index of the offered buffer


class ShmTransport:
    """One-sided transport: an operation needs the peers' parts, but not the peers' participation at the same moment.

    In a reduction, a rank raises the counter `offered` once its part may be read, and `taken` once it has read the
    peers' parts; in an all-gather, the counters are `published` and `gathered`. Before a rank writes a buffer again, it
    waits for its peers' `taken` and `gathered` (`wait_until_read`).

    A transient buffer that is not `shared` is private to this rank, and is gathered through `GatherWindows`. A lane is
    the sequence of reductions of one gradient.
    """

    name = "shm"

    def __init__(self, group: RankGroup, timeout: timedelta) -> None:
        self.group, self.traffic = group, Traffic()
        self._timeout = timeout
        self._rounds: list[int] = []
        self._lanes: list[int] = []  # first counter of each lane

    def allocate(self, needs: list[BufferRequest], device: torch.device, *, lanes: int = 0) -> list[TransportBuffer]:
        """Allocate zeroed buffers in shared memory.

        `shared` buffers exist once for the group. Other transient buffers are in private memory, and are
        gathered through `GatherWindows`.
        """
        size = self.group.size
        alone = [need for need in needs if need.transient and not need.shared]
        # A window holds one shard of the largest transient buffer.
        window = max((_bytes(need) // size for need in alone), default=0) if size > 1 else 0
        starts = iter(_places([window] * WINDOWS + [_bytes(n) for n in needs if not n.shared and not n.transient]))
        own = [next(starts) for _ in range(WINDOWS)]
        places = {False: starts, True: iter(_places([_bytes(n) for n in needs if n.shared]))}
        planned = [None if n.transient and not n.shared else next(places[n.shared]) for n in needs]
        memory = SharedMemory(self.group, next(starts))
        # The first rank's block holds the shared buffers; the blocks of the other ranks are not used.
        total = next(places[True])
        shared = SharedMemory(self.group, total if self.group.index == 0 else 1) if total else memory
        rest = self._open_lanes(_PER_BUFFER * len(needs), lanes)
        self._counters = Counters(self.group, rest + COUNTERS + agreement_board.COUNTERS, self._timeout)
        self._board = rest + COUNTERS
        shown = [[block[at : at + window] for block in memory.blocks] for at in own]
        self._windows = GatherWindows(self.group, shown, self._counters, rest, self.traffic)
        buffers: list[TransportBuffer] = []
        for number, (need, start) in enumerate(zip(needs, planned, strict=True)):
            # Private pages: peers do not map them, so they are cheap to free and allocate again.
            if start is None:
                pages = AnonymousPages(_bytes(need))
                local = pages.bytes[: _bytes(need)].view(need.dtype)
                buffers.append(TransportBuffer(local, key=_PER_BUFFER * number, pages=pages))
                continue
            blocks = [shared.blocks[0]] * size if need.shared else memory.blocks
            parts = [block[start : start + _bytes(need)].view(need.dtype) for block in blocks]
            buffers.append(TransportBuffer(parts[self.group.index], parts, need.shared, _PER_BUFFER * number))
        return buffers

    def extend(self, needs: list[BufferRequest], device: torch.device, *, lanes: int = 0) -> list[TransportBuffer]:
        memory_of = _places([_bytes(need) for need in needs])
        memory = SharedMemory(self.group, memory_of[-1])
        first = self._counters.extend(_PER_BUFFER * len(needs) + _PER_LANE * lanes)
        self._open_lanes(first + _PER_BUFFER * len(needs), lanes)
        buffers = []
        for number, (need, start) in enumerate(zip(needs, memory_of, strict=False)):
            parts = [block[start : start + _bytes(need)].view(need.dtype) for block in memory.blocks]
            buffers.append(TransportBuffer(parts[self.group.index], parts, key=first + _PER_BUFFER * number))
        return buffers

    def _open_lanes(self, first: int, lanes: int) -> int:
        """Add lanes whose counters begin at `first`. Return the index after the last counter."""
        self._lanes += [first + _PER_LANE * lane for lane in range(lanes)]
        self._rounds += [0] * lanes
        return first + _PER_LANE * lanes

    def reduce(
        self,
        lane: int,
        buffer: TransportBuffer,
        out: torch.Tensor,
        *,
        add: bool,
        factor: float,
        elements: int,
        wire: torch.dtype,
    ) -> ShmReduction:
        return ShmReduction(self, lane, buffer, out, add, factor, elements, wire)

    def error_feedback(self, lane: int) -> None:
        return None

    def publish(self, buffer: TransportBuffer) -> None:
        buffer.published += 1
        self._counters.raise_to(buffer.key, buffer.published)

    def all_gather(self, buffer: TransportBuffer, *, elements: int, ready: Pending = DONE) -> Pending:
        if self.group.size == 1:
            return ready
        if buffer.pages is not None:
            return self._windows.gather(buffer, ready, elements)
        round_number, counters = buffer.published, self._counters

        def read() -> None:
            size, moved = self.group.size, 0
            for index, part in enumerate(buffer.parts):
                # A shared buffer already has the peers' values.
                if index != self.group.index and not buffer.shared:
                    theirs = local_shard(part, index, size)
                    local_shard(buffer.local, index, size).copy_(theirs)
                    moved += theirs.numel() * theirs.element_size()
            # Peers may write their shards again after this.
            counters.raise_to(buffer.key + 1, round_number)
            self.traffic.add("gather", elements, moved)

        step = FinishingPending(
            lambda: counters.reached(buffer.key, round_number),
            lambda: counters.wait(buffer.key, round_number, "a gather"),
            read,
        )
        return step if ready is DONE else ChainedPending(ready, lambda: step)

    def board(self) -> SharedMemoryBoard:
        return SharedMemoryBoard(self.group, self._counters, self._board)

    def wait_until_read(self, buffer: TransportBuffer) -> None:
        what = "the release of a buffer"
        self._counters.wait(buffer.key + 1, buffer.published, what)
        if buffer.mark.round_number:
            self._counters.wait(self._lane(buffer.mark.lane) + 1, buffer.mark.round_number, what)

    def free_memory(self, buffer: TransportBuffer) -> None:
        if buffer.pages is not None:
            buffer.pages.discard()
        else:
            self.wait_until_read(buffer)

    def allocate_memory(self, buffer: TransportBuffer) -> None:
        return  # nothing to do: the first access allocates the pages again

    def offer(self, lane: int, buffer: TransportBuffer) -> int:
        """Mark this rank's part of a lane's next sum as readable, once peers have read the previous part.

        Return the number of this round.
        """
        base = self._lane(lane)
        # A peer that has not read the previous round would look for it at this buffer's ring index.
        self._counters.wait(base + 1, self._rounds[lane], "the previous reduction")
        self._rounds[lane] += 1
        round_number = self._rounds[lane]
        buffer.mark.lane, buffer.mark.round_number = lane, round_number
        self._counters.set(base + 2, buffer.ring_index)
        # Raise this counter last: it makes the ring index and the buffer's content visible to peers.
        self._counters.raise_to(base, round_number)
        return round_number

    def taken(self, lane: int, round_number: int) -> None:
        """Record that this rank has read its peers' parts of this round."""
        self._counters.raise_to(self._lane(lane) + 1, round_number)

    def offered(self, lane: int, round_number: int) -> bool:
        """Return True if all peers have offered their parts of this round."""
        return self._counters.reached(self._lane(lane), round_number)

    def wait(self, lane: int, round_number: int) -> None:
        """Block until all peers have offered their parts of this round."""
        self._counters.wait(self._lane(lane), round_number, "a gradient reduction")

    def parts(self, lane: int, buffer: TransportBuffer) -> list[torch.Tensor]:
        """Return this rank's shard of every rank's buffer that is offered in a lane, in rank order."""
        group, numel = self.group, buffer.local.numel()
        found = []
        for rank in range(group.size):
            # Ranks borrow ring buffers independently, so a peer's buffer may have another index.
            place = buffer.ring_index if rank == group.index else self._counters.read(rank, self._lane(lane) + 2)
            full = buffer.ring[place][rank] if buffer.ring else buffer.parts[rank]
            found.append(local_shard(full[:numel], group.index, group.size))
        return found

    def _lane(self, lane: int) -> int:
        return self._lanes[lane]


class ShmReduction:
    """Reduction whose sum this rank computes once all peers have offered their parts."""

    def __init__(
        self,
        transport: ShmTransport,
        lane: int,
        buffer: TransportBuffer,
        out: torch.Tensor,
        add: bool,
        factor: float,
        elements: int,
        wire: torch.dtype,
    ) -> None:
        self.squares: torch.Tensor | None = None
        self._transport, self._lane, self._buffer, self._out = transport, lane, buffer, out
        self._add, self._factor, self._elements, self._wire = add, factor, elements, wire
        round_number = self._round_number = transport.offer(lane, buffer)
        self._step = FinishingPending(
            lambda: transport.offered(lane, round_number), lambda: transport.wait(lane, round_number), self._finish
        )

    def poll(self) -> bool:
        return self._step.poll()

    def wait(self) -> None:
        self._step.wait()

    def _finish(self) -> None:
        size = self._transport.group.size
        parts = self._transport.parts(self._lane, self._buffer)
        # Round to the reduce dtype as a wire transport would, so that transports give the same bits.
        if self._wire != parts[0].dtype:
            parts = [part.to(self._wire) for part in parts]
        self.squares = ordered_sum(parts, self._out, add=self._add, factor=self._factor, measure=True)
        self._transport.taken(self._lane, self._round_number)
        moved = (size - 1) * self._out.numel() * self._wire.itemsize
        self._transport.traffic.add("reduce", self._elements if size > 1 else 0, moved)


def _bytes(need: BufferRequest) -> int:
    return need.numel * need.dtype.itemsize


def _places(sizes: list[int]) -> list[int]:
    """Return the aligned start of each part in one block, given the parts' sizes, and last the size of the block."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGN) * _ALIGN)
    return starts
