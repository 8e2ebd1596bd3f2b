"""All-gathers and reductions whose messages pass through a codec (ZeRO++), for transports that send messages.

[Note: quantized messages] Wang et al., "ZeRO++", arXiv:2306.10209. In an all-gather each shard is one message, encoded
by the codec of the buffer; all ranks, the owner included, use the decoded values, so that they compute with the same
weights. A gradient is reduced in two hops. The counterparts of a rank are the ranks of other nodes that have the same
position in their node. First, each rank receives the parts of the ranks of its node for its own shard and for the
shards of its counterparts, and sums them per shard. Then it receives its counterparts' sums for its own shard. Each hop
has a codec. A rank adds its own part without encoding, since no other rank uses it. Each shard is encoded by itself,
and sums are in rank order.

A block with a value that is not finite is decoded as values that are not finite, so that the gradient norm shows the
overflow on every rank; `codec_check` refuses other codecs for gradients. Error feedback then leaves the error of this
shard unchanged.

LoCo (Xie et al., "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", arXiv:2407.04480): a rank adds
its error to a part before the part is sent, and then moves the error towards the values that the message left out:
`err_beta * error + (1 - err_beta) * left_out`. Errors are set to zero every `reset_T` reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from windlass.base.collective_activity import activity
from windlass.base.pending import FinishingPending, Pending
from windlass.comm.codec import Codec, get_codec
from windlass.comm.ordered_sum import sum_of_squares
from windlass.comm.quantized_options import LaneErrors, QuantizedGradients, ranks_of_node
from windlass.comm.rank_group import RankGroup
from windlass.comm.transport import TransportBuffer, local_shard

Sends = Mapping[int, torch.Tensor]


def start_exchange(group: RankGroup, sends: Sends, receives: Sends, tag: int) -> list[dist.Work]:
    """Start the sends and receives of uint8 tensors. Return the started operations.

    Messages are matched by their tag; on NCCL, by their order.

    Args:
        sends, receives: tensor for each peer, by the peer's group index.
    """
    pg = group.process_group
    if dist.get_backend(pg) != "nccl":
        works: list[dist.Work | None] = []
        for peer, tensor in receives.items():
            works.append(dist.irecv(tensor, group.ranks[peer], group=pg, tag=tag))
        for peer, tensor in sends.items():
            works.append(dist.isend(tensor, group.ranks[peer], group=pg, tag=tag))
    else:
        moves = [dist.P2POp(dist.irecv, tensor, group.ranks[peer], pg) for peer, tensor in receives.items()]
        moves += [dist.P2POp(dist.isend, tensor, group.ranks[peer], pg) for peer, tensor in sends.items()]
        works = list(dist.batch_isend_irecv(moves)) if moves else []
    for work in works:
        assert work is not None
    return [work for work in works if work is not None]


def encode(codec: Codec, values: torch.Tensor, encoded: torch.Tensor) -> None:
    """Write the encoding of `values` to `encoded`, by `encode_unchecked` if the codec has this method."""
    unchecked: Callable[[torch.Tensor, torch.Tensor], None] = getattr(codec, "encode_unchecked", codec.encode)
    unchecked(values, encoded)


def quantized_gather(group: RankGroup, buffer: TransportBuffer, tag: int) -> Pending:
    """Start to all-gather the shards of a buffer, encoded by its codec.

    When the operation is finished, all shards, also this rank's, have their decoded values.
    Messages are matched by their tag; on NCCL, by their order.
    """
    assert buffer.codec is not None
    flat, codec = buffer.local, get_codec(buffer.codec)
    own = local_shard(flat, group.index, group.size)
    nbytes = codec.encoded_size(own.numel(), flat.dtype)
    messages = {i: torch.empty(nbytes, dtype=torch.uint8, device=flat.device) for i in range(group.size)}
    encode(codec, own, messages[group.index])
    receives = {i: message for i, message in messages.items() if i != group.index}
    works = start_exchange(group, dict.fromkeys(receives, messages[group.index]), receives, tag)

    def finish() -> None:
        for index, message in messages.items():
            codec.decode(message, local_shard(flat, index, group.size), flat.dtype)
        messages.clear()

    return FinishingPending(lambda: all(work.is_completed() for work in works), lambda: _wait(works), finish)


class QuantizedReduction:
    """Reduction in flight, in two hops: see [Note: quantized messages].

    Args:
        flat: `[numel]`, the gradient of this rank.
        out: `[numel / size]`, to which `factor *` the sum is written, or added with `add`.
        errors: error feedback of all reductions of this gradient; None without `options.loco`.
        tags: message tags of the first and the second hop.
        node_size: see `WireOptions.node_size`.
        eager: start the second hop in the constructor, not in `poll` or `wait`. Needed for messages without tags, which
            all ranks must start in the same order.
    """

    def __init__(
        self,
        group: RankGroup,
        flat: torch.Tensor,
        out: torch.Tensor,
        add: bool,
        factor: float,
        options: QuantizedGradients,
        errors: LaneErrors | None,
        tags: tuple[int, int],
        *,
        node_size: int,
        eager: bool,
    ) -> None:
        self.squares: torch.Tensor | None = None
        self._group, self._flat, self._out, self._add, self._factor = group, flat, out, add, factor
        self._options, self._tags = options, tags
        self._node = ranks_of_node(group, node_size)
        self._lane_errors = errors
        self._errors: torch.Tensor | None = None  # errors `[numel]`, until the last message is encoded
        if errors is not None:
            assert options.loco is not None
            self._errors = errors.begin(options.loco, flat.numel(), flat.device)
        self._works: list[dist.Work] = []
        self._kept: list[torch.Tensor] = []  # messages that must not be freed until they are sent
        self._received: dict[tuple[int, int], torch.Tensor] = {}
        self._sums: dict[int, torch.Tensor] = {}
        self._second = False
        self._start_inside()
        if eager:
            self._start_second_hop()
        self._step = FinishingPending(self._ready, lambda: None, self._finish)

    def poll(self) -> bool:
        return self._step.poll()

    def wait(self) -> None:
        self._step.wait()

    def _ready(self) -> bool:
        if all(work.is_completed() for work in self._works):
            if self._second:
                return True
            self._start_second_hop()
        return False

    @property
    def _counterparts(self) -> list[int]:
        """Group indices of the ranks that have this rank's position in their node, this rank included."""
        return list(range(self._group.index % self._node, self._group.size, self._node))

    def _start_inside(self) -> None:
        """Start the first hop: send each peer of this node the parts for its and its counterparts' shards."""
        activity.progress_count += 1
        group, codec = self._group, get_codec(self._options.inside)
        first = group.index // self._node * self._node
        mates = [i for i in range(first, first + self._node) if i != group.index]
        sends, receives = {}, {}
        for mate in mates:
            shards = list(range(mate % self._node, group.size, self._node))
            parts = [local_shard(self._flat, shard, group.size) for shard in shards]
            sends[mate] = self._message(codec, dict(zip(shards, parts, strict=True)))
            receives[mate] = torch.empty(self._nbytes(codec, len(shards)), dtype=torch.uint8, device=self._flat.device)
        self._received = {(0, mate): message for mate, message in receives.items()}
        self._kept = list(sends.values())
        self._works = start_exchange(group, sends, receives, self._tags[0])

    def _start_second_hop(self) -> None:
        """Wait for the first hop, sum its parts, and start the second: send each counterpart the sum for its shard."""
        _wait(self._works)
        activity.progress_count += 1
        group, codec = self._group, get_codec(self._options.inside)
        first = group.index // self._node * self._node
        shards = self._counterparts
        sums = {shard: torch.zeros(self._out.numel(), device=self._flat.device) for shard in shards}
        for mate in range(first, first + self._node):
            if mate == group.index:
                for shard in shards:
                    sums[shard].add_(local_shard(self._flat, shard, group.size))
                continue
            for shard, value in self._decoded(codec, self._received[0, mate], shards).items():
                sums[shard].add_(value)
        self._sums, self._second = sums, True
        codec = get_codec(self._options.across)
        others = [shard for shard in shards if shard != group.index]
        sends = {other: self._message(codec, {other: sums[other]}) for other in others}
        receives = {
            other: torch.empty(self._nbytes(codec, 1), dtype=torch.uint8, device=self._flat.device) for other in others
        }
        self._received = {(1, other): message for other, message in receives.items()}
        self._kept = list(sends.values())
        self._works = start_exchange(group, sends, receives, self._tags[1])
        if self._lane_errors is not None and self._errors is not None:
            self._lane_errors.end(self._errors)
            self._errors = None

    def _finish(self) -> None:
        if not self._second:
            self._start_second_hop()
        _wait(self._works)
        group, codec = self._group, get_codec(self._options.across)
        total = torch.zeros(self._out.numel(), device=self._flat.device)
        for rank in self._counterparts:
            if rank == group.index:
                total.add_(self._sums[rank])
            else:
                total.add_(self._decoded(codec, self._received[1, rank], [rank])[rank])
        if self._add:
            self._out.add_(total, alpha=self._factor)
        else:
            torch.mul(total, self._factor, out=total)
            self._out.copy_(total)
        self.squares = sum_of_squares(self._out)
        self._works, self._kept, self._received, self._sums = [], [], {}, {}

    def _nbytes(self, codec: Codec, shards: int) -> int:
        return shards * _aligned(codec.encoded_size(self._out.numel(), torch.float32))

    def _message(self, codec: Codec, parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return the parts, by shard, as one message encoded from float32, and update the errors of these shards."""
        message = torch.empty(self._nbytes(codec, len(parts)), dtype=torch.uint8, device=self._flat.device)
        size = codec.encoded_size(self._out.numel(), torch.float32)
        for number, (shard, part) in enumerate(parts.items()):
            start = number * _aligned(size)
            values = part.float()
            if self._errors is not None:
                values = values + local_shard(self._errors, shard, self._group.size)
            encode(codec, values.contiguous(), message[start : start + size])
            if self._errors is not None:
                error = local_shard(self._errors, shard, self._group.size)
                self._update_error(codec, message[start : start + size], values, error)
        return message

    def _update_error(self, codec: Codec, message: torch.Tensor, values: torch.Tensor, error: torch.Tensor) -> None:
        loco = self._options.loco
        assert loco is not None
        decoded = torch.empty_like(values)
        codec.decode(message, decoded, torch.float32)
        left_out = (values - decoded).mul_(1 - loco.err_beta)
        if bool(torch.isfinite(left_out).all()):
            error.copy_(left_out.add_(error, alpha=loco.err_beta))

    def _decoded(self, codec: Codec, message: torch.Tensor, shards: list[int]) -> dict[int, torch.Tensor]:
        size = codec.encoded_size(self._out.numel(), torch.float32)
        values = {}
        for number, shard in enumerate(shards):
            start = number * _aligned(size)
            values[shard] = torch.empty(self._out.numel(), device=self._flat.device)
            codec.decode(message[start : start + size], values[shard], torch.float32)
        return values


def gather_bytes(group: RankGroup, buffer: TransportBuffer, node_size: int) -> tuple[int, int]:
    """Return how many bytes a rank receives inside its node, and across nodes, in a quantized all-gather."""
    assert buffer.codec is not None
    shard = get_codec(buffer.codec).encoded_size(buffer.local.numel() // group.size, buffer.local.dtype)
    node = ranks_of_node(group, node_size)
    return (node - 1) * shard, (group.size - node) * shard


def reduction_bytes(group: RankGroup, numel: int, options: QuantizedGradients, node_size: int) -> tuple[int, int]:
    """Return how many bytes a rank receives inside its node, and across nodes, in a quantized reduction."""
    node, shard = ranks_of_node(group, node_size), numel // group.size
    nodes = group.size // node
    inside = _aligned(get_codec(options.inside).encoded_size(shard, torch.float32))
    across = _aligned(get_codec(options.across).encoded_size(shard, torch.float32))
    return (node - 1) * nodes * inside, (nodes - 1) * across


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
