"""Transports over torch.distributed: gloo and MPI with pairwise exchanges, NCCL with its own collectives."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.collective_activity import activity
from windlass.base.pending import DONE, ChainedPending, FinishingPending, Pending
from windlass.comm.agreement_board import WireBoard
from windlass.comm.ordered_sum import ordered_sum, sum_of_squares
from windlass.comm.quantized_options import LaneErrors, ranks_of_host, ranks_of_node
from windlass.comm.quantized_wire import (
    QuantizedReduction,
    gather_bytes,
    quantized_gather,
    reduction_bytes,
)
from windlass.comm.rank_group import RankGroup
from windlass.comm.traffic import Traffic
from windlass.comm.transport import BufferRequest, Reduction, TransportBuffer, WireOptions, local_shard

# torch 2.13 renamed both functions: the older names raise a warning there, the newer ones do not exist in 2.10.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _WireTransport:
    """Base class of the wire transports. Buffers are private to their rank.

    `wait_until_read` does nothing, because a collective ends only after its buffers were read.
    """

    name = "wire"

    def __init__(self, group: RankGroup, ways: WireOptions) -> None:
        if ways.host_size:
            ways = replace(ways, node_size=ranks_of_host(group.ranks, ways.host_size))
        self.group, self.traffic, self.ways = group, Traffic(), ways
        self._tag = 0
        self._waiting: deque[ChainedPending] = deque()
        self._errors: dict[int, LaneErrors] = {}  # error feedback by lane (all reductions of one gradient)

    def allocate(self, needs: list[BufferRequest], device: torch.device, *, lanes: int = 0) -> list[TransportBuffer]:
        return [TransportBuffer(_flat(need, device), codec=need.codec) for need in needs]

    def extend(self, needs: list[BufferRequest], device: torch.device, *, lanes: int = 0) -> list[TransportBuffer]:
        return self.allocate(needs, device, lanes=lanes)

    def board(self) -> WireBoard:
        return WireBoard(self.group)

    def wait_until_read(self, buffer: TransportBuffer) -> None:
        return

    def publish(self, buffer: TransportBuffer) -> None:
        return

    def free_memory(self, buffer: TransportBuffer) -> None:
        buffer.local.untyped_storage().resize_(0)

    def allocate_memory(self, buffer: TransportBuffer) -> None:
        buffer.local.untyped_storage().resize_(buffer.local.numel() * buffer.local.element_size())

    def all_gather(self, buffer: TransportBuffer, *, elements: int, ready: Pending = DONE) -> Pending:
        if self.group.size == 1:
            return ready
        if buffer.codec is None:
            self._count("gather", elements, buffer.local.numel(), buffer.local.element_size())
        else:
            self._count_quantized("gather", elements, *gather_bytes(self.group, buffer, self.ways.node_size))
        self._begin_waiting()
        tag, start = self._next_tag(), self._gather if self.ways.use_all_gather else self._broadcast_shards
        begin = partial(start, buffer.local, tag)
        if buffer.codec is not None:
            begin = partial(quantized_gather, self.group, buffer, tag)
        if ready is DONE:
            return begin()
        waiting = ChainedPending(ready, begin)
        self._waiting.append(waiting)
        return waiting

    def error_feedback(self, lane: int) -> LaneErrors | None:
        options = self.ways.gradients
        if options is None or options.loco is None or self.group.size == 1:
            return None
        return self._errors.setdefault(lane, LaneErrors())

    def _begin_reduction(self, buffer: TransportBuffer, elements: int, wire: torch.dtype) -> None:
        self._count("reduce", elements, buffer.local.numel(), wire.itemsize)
        # Peers start their postponed all-gathers before this reduction, so this rank must too.
        self._begin_waiting()

    def _reduce_quantized(
        self, lane: int, buffer: TransportBuffer, out: torch.Tensor, add: bool, factor: float, elements: int
    ) -> Reduction | None:
        """Start a reduction whose messages pass through codecs. Return None without such codecs, or without peers."""
        options = self.ways.gradients
        if options is None or self.group.size == 1:
            return None
        inside, across = reduction_bytes(self.group, buffer.local.numel(), options, self.ways.node_size)
        self._count_quantized("reduce", elements, inside, across)
        self._begin_waiting()
        errors = self.error_feedback(lane)
        tags = self._next_tag(), self._next_tag()
        return QuantizedReduction(
            self.group,
            buffer.local,
            out,
            add,
            factor,
            options,
            errors,
            tags,
            node_size=self.ways.node_size,
            eager=not self._tagged,
        )

    def _count_quantized(self, operation: str, elements: int, inside: int, across: int) -> None:
        self.traffic.add(operation, elements, inside + across, across)

    @property
    def _reduces_whole(self) -> bool:
        """True if each rank receives the full sum and keeps only its shard."""
        return not self.ways.use_reduce_scatter and self.group.size > 1

    def _begin_waiting(self) -> None:
        """Wait until this rank's shards for postponed all-gathers are ready, and start these all-gathers.

        Transports without tags match messages by order, so all ranks must start their collectives in one order. With
        tags this starts nothing: a postponed all-gather starts when it is polled or waited for.
        """
        while self._waiting:
            first = self._waiting.popleft()
            # With tags the messages of two collectives cannot be mixed up, so the gather may start later.
            if not self._tagged:
                first.wait_for_first()

    @property
    def _tagged(self) -> bool:
        """True if tags distinguish the messages of different collectives."""
        return False

    def _gather(self, flat: torch.Tensor, tag: int) -> Pending:
        raise NotImplementedError

    def _broadcast_shards(self, flat: torch.Tensor, tag: int) -> Pending:
        """All-gather by one broadcast per rank (`allgather_partitions: false`)."""
        works: list[dist.Work] = []
        for index, rank in enumerate(self.group.ranks):
            part = local_shard(flat, index, self.group.size).view(torch.uint8)
            works += _started(dist.broadcast(part, rank, group=self.group.process_group, async_op=True))
        return FinishingPending(None, lambda: _wait(works), lambda: None)

    def _next_tag(self) -> int:
        """Return a tag for one operation. All ranks get the same tag, because they start operations in one order."""
        self._tag = (self._tag + 1) % (1 << 20)
        return self._tag

    def _count(self, operation: str, elements: int, numel: int, itemsize: int) -> None:
        size = self.group.size
        others = (size - 1) * numel // size
        across = (size - ranks_of_node(self.group, self.ways.node_size)) * numel // size
        self.traffic.add(operation, elements if size > 1 else 0, others * itemsize, across * itemsize)


class GlooTransport(_WireTransport):
    """Transport over gloo: each rank sends each peer only the data that the peer needs.

    Gloo's own reduce-scatter sends as many bytes as its all-reduce. A pairwise exchange with an ordered sum sends half
    of that, (size - 1) / size of the buffer, and gives bitwise the same result as the shared-memory transport.
    """

    name = "gloo"

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
    ) -> Reduction:
        quantized = self._reduce_quantized(lane, buffer, out, add, factor, elements)
        if quantized is not None:
            return quantized
        self._begin_reduction(buffer, elements, wire)
        if self._reduces_whole:
            return WholeReduction(self.group, buffer.local, out, add, factor, wire)
        reduction = GlooReduction(self.group, buffer.local, out, add, factor, wire, self.ways, self._next_tag())
        reduction.start()
        return reduction

    @property
    def _tagged(self) -> bool:
        return self.ways.use_all_gather and self.ways.use_reduce_scatter

    def _gather(self, flat: torch.Tensor, tag: int) -> Pending:
        group, pg = self.group, self.group.process_group
        span = max(1, self.ways.gather_chunk // group.size)
        own = local_shard(flat, group.index, group.size)
        works: list[dist.Work] = []
        for start in range(0, own.numel(), span):
            for index in _peers(group, rotate=self.ways.rotate_peers):
                theirs = local_shard(flat, index, group.size)[start : start + span]
                # Send bytes, which every backend supports.
                works += _started(
                    dist.irecv(theirs.view(torch.uint8), group.ranks[index], group=pg, tag=tag),
                    dist.isend(own[start : start + span].view(torch.uint8), group.ranks[index], group=pg, tag=tag),
                )
        return FinishingPending(None, lambda: _wait(works), lambda: None)


class MpiTransport(GlooTransport):
    """Transport over MPI by the exchanges of `GlooTransport`, with bitwise the same results.

    GPU tensors travel through host memory, unless the MPI is CUDA-aware.
    """

    name = "mpi"


class GlooReduction:
    """Reduction by pairwise exchange and ordered sum, chunk by chunk. The caller starts the first chunk by `start`."""

    def __init__(
        self,
        group: RankGroup,
        flat: torch.Tensor,
        out: torch.Tensor,
        add: bool,
        factor: float,
        wire: torch.dtype,
        ways: WireOptions,
        tag: int,
    ) -> None:
        self.squares: torch.Tensor | None = None
        self._group, self._flat, self._out, self._tag = group, flat, out, tag
        self._add, self._factor, self._wire, self._rotate = add, factor, wire, ways.rotate_peers
        # Chunks bound the memory of the receive buffers, one for each peer.
        self._span = max(1, min(out.numel(), ways.reduce_chunk // group.size))
        self._works: list[dist.Work] = []
        self._parts: list[torch.Tensor] = []
        self._sent: list[torch.Tensor] = []  # tensors that must not be freed until they are sent
        self._step = FinishingPending(self._ready, lambda: None, self._finish)

    def poll(self) -> bool:
        return self._step.poll()

    def wait(self) -> None:
        self._step.wait()

    def _ready(self) -> bool:
        return self._span >= self._out.numel() and all(work.is_completed() for work in self._works)

    def start(self, begin: int = 0) -> None:
        activity.progress_count += 1
        group, end = self._group, min(begin + self._span, self._out.numel())
        parts = [local_shard(self._flat, index, group.size)[begin:end].to(self._wire) for index in range(group.size)]
        self._sent, self._parts, self._works = parts, list(parts), []
        pg, tag = group.process_group, self._tag
        for index in _peers(group, rotate=self._rotate):
            self._parts[index] = torch.empty_like(parts[index])
            # Send bytes, which every backend supports.
            self._works += _started(
                dist.irecv(self._parts[index].view(torch.uint8), group.ranks[index], group=pg, tag=tag),
                dist.isend(parts[index].view(torch.uint8), group.ranks[index], group=pg, tag=tag),
            )

    def _finish(self) -> None:
        begin, squares = 0, None
        whole = self._span >= self._out.numel()
        while True:
            _wait(self._works)
            end = min(begin + self._span, self._out.numel())
            target = self._out[begin:end]
            squares = ordered_sum(self._parts, target, add=self._add, factor=self._factor, measure=whole)
            begin = end
            if begin >= self._out.numel():
                break
            self.start(begin)
        self._works, self._parts, self._sent = [], [], []
        # Adding up the chunks' sums of squares would round differently than other transports do.
        self.squares = squares if whole else sum_of_squares(self._out)


class NcclTransport(_WireTransport):
    """Transport over NCCL: reduce-scatter and all-gather, which run on NCCL's own stream once they are started."""

    name = "nccl"

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
    ) -> Reduction:
        quantized = self._reduce_quantized(lane, buffer, out, add, factor, elements)
        if quantized is not None:
            return quantized
        self._begin_reduction(buffer, elements, wire)
        kind = WholeReduction if self._reduces_whole else NcclReduction
        return kind(self.group, buffer.local, out, add, factor, wire)

    def _gather(self, flat: torch.Tensor, tag: int) -> Pending:
        group = self.group
        own = local_shard(flat, group.index, group.size)
        works = _started(_ALL_GATHER(flat, own, group=group.process_group, async_op=True))
        activity.collective_started(works[0])
        return FinishingPending(None, lambda: _wait(works), lambda: None)


class _NcclSum:
    """Reduction by a collective of torch, whose result is scaled into `out` at the end."""

    def __init__(self, out: torch.Tensor, add: bool, factor: float) -> None:
        self.squares: torch.Tensor | None = None
        self._out, self._add, self._factor = out, add, factor
        self._sum = out
        self._work: dist.Work | None = None
        self._step = FinishingPending(None, self._block, self._finish)

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
        self._sum = self._out


class NcclReduction(_NcclSum):
    """Reduce-scatter in flight."""

    def __init__(
        self, group: RankGroup, flat: torch.Tensor, out: torch.Tensor, add: bool, factor: float, wire: torch.dtype
    ) -> None:
        super().__init__(out, add, factor)
        # Keep a reference: NCCL reads the tensor until the collective ends.
        self._sent = flat.to(wire)
        self._sum = self._sent
        if group.size > 1:
            self._sum = torch.empty(out.numel(), dtype=wire, device=out.device)
            pg = group.process_group
            self._work = _REDUCE_SCATTER(self._sum, self._sent, group=pg, async_op=True)
            activity.collective_started(self._work)


class WholeReduction(_NcclSum):
    """All-reduce of the full buffer; this rank keeps only its shard (`reduce_scatter: false`)."""

    def __init__(
        self, group: RankGroup, flat: torch.Tensor, out: torch.Tensor, add: bool, factor: float, wire: torch.dtype
    ) -> None:
        super().__init__(out, add, factor)
        # A copy, because the all-reduce works in place and `flat` has to stay as it is.
        full = flat.to(wire, copy=True)
        self._sum = local_shard(full, group.index, group.size)
        self._work = dist.all_reduce(full, group=group.process_group, async_op=True)


def _flat(need: BufferRequest, device: torch.device) -> torch.Tensor:
    """Return zeros; for a transient buffer, which has memory only while it is used, a tensor without memory."""
    if not need.transient:
        return torch.zeros(need.numel, dtype=need.dtype, device=device)
    flat = torch.empty(need.numel, dtype=need.dtype, device=device)
    flat.untyped_storage().resize_(0)
    return flat


def _peers(group: RankGroup, *, rotate: bool) -> list[int]:
    """Return the indices of the other ranks.

    With `rotate`, each rank starts with its successor, which spreads the load.
    """
    if rotate:
        return [(group.index + step) % group.size for step in range(1, group.size)]
    return [index for index in range(group.size) if index != group.index]


def _started(*works: dist.Work | None) -> list[dist.Work]:
    """Return the handles of started operations. torch returns None only on ranks outside the group."""
    assert None not in works
    return [work for work in works if work is not None]


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
