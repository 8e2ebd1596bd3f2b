"""Transport protocol: buffers that peers can reach, and collectives on shards of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from windlass.base.pending import DONE, Pending
from windlass.comm.agreement_board import AgreementBoard
from windlass.comm.anonymous_pages import AnonymousPages
from windlass.comm.quantized_options import LaneErrors, QuantizedGradients
from windlass.comm.rank_group import RankGroup
from windlass.comm.traffic import Traffic


@dataclass(frozen=True)
class WireOptions:
    """Options of a wire transport. The shared-memory transport has no options.

    Args:
        reduce_chunk: Gradient elements that gloo and MPI reduce at once (`reduce_bucket_size`).
        gather_chunk: Parameter elements that each rank sends to each peer in one message of a gather over gloo or MPI
            (`allgather_bucket_size`).
        use_reduce_scatter: Send each rank only its shard of a sum; else all-reduce (`reduce_scatter`).
        use_all_gather: Gather all shards together; else by one broadcast per rank (`allgather_partitions`).
        rotate_peers: With gloo and MPI, each rank sends to a different peer first (`round_robin_gradients`).
        quantizes: True if some messages pass through a codec (ZeRO++); shared memory is then not used.
        node_size: Number of consecutive ranks of a group on one node, for quantized messages and counts of bytes.
        host_size: Number of consecutive ranks of the world on one host, from which each group's `node_size` is
            computed; 0: use `node_size`.
        gradients: Codecs and error feedback of reductions; None: gradients are sent in the dtype of the call.
    """

    reduce_chunk: int = 500_000_000
    gather_chunk: int = 500_000_000
    use_reduce_scatter: bool = True
    use_all_gather: bool = True
    rotate_peers: bool = False
    quantizes: bool = False
    node_size: int = 1
    host_size: int = 0
    gradients: QuantizedGradients | None = None


@dataclass
class BufferRequest:
    """Request for a buffer.

    Args:
        numel: Elements, a multiple of the group's size.
        dtype: Dtype of the elements.
        shared: True: one buffer for all ranks of the group, each of which writes its shard, if the transport supports
            it.
        transient: True: the memory will be freed and allocated again.
        codec: Registered name of the codec of the buffer's all-gathers, on a wire transport; None: exact all-gathers.
    """

    numel: int
    dtype: torch.dtype
    shared: bool = False
    transient: bool = False
    codec: str | None = None


@dataclass
class OfferMark:
    """Last reduction in which a buffer was offered to peers: its lane, and its number in the lane; 0: none so far."""

    lane: int = 0
    round_number: int = 0


@dataclass
class TransportBuffer:
    """Flat buffer of this rank and, if the transport maps them, the same buffer of its peers.

    Attributes:
        local: `[numel]`, the buffer of this rank.
        parts: Every rank's `local` in group order; empty if peers cannot be read.
        shared: True: `local` is the same memory on all ranks.
        key: Index of the buffer's first counter in shared memory; 0 for a wire transport.
        published: Number of times that this rank's shard was published.
        ring: `parts` of each buffer of the ring, the buffers that gradients borrow in turn; empty if this buffer is in
            no ring, or has no `parts`.
        ring_index: Index of this buffer in `ring`. Ranks may have the same gradient at different indices.
        mark: Mark of the last reduction, common to all slices of one buffer.
        codec: Name of the codec of the buffer's all-gathers over a wire transport; None: exact all-gathers.
        pages: Memory of `local` if the shared-memory transport holds the buffer in private memory; else None.
    """

    local: torch.Tensor
    parts: list[torch.Tensor] = field(default_factory=list)
    shared: bool = False
    key: int = 0
    published: int = 0
    ring: list[list[torch.Tensor]] = field(default_factory=list)
    ring_index: int = 0
    mark: OfferMark = field(default_factory=OfferMark)
    pages: AnonymousPages | None = None
    codec: str | None = None

    def first(self, numel: int) -> TransportBuffer:
        """Return the first `numel` elements as a slice of the same buffer. Only `local` is sliced."""
        return replace(self, local=self.local[:numel])


def local_shard(flat: torch.Tensor, index: int, count: int) -> torch.Tensor:
    """Return the `index`-th of `count` equal parts of a flat tensor, as a view."""
    size = flat.numel() // count
    return flat.narrow(0, index * size, size)


class Transport(Protocol):
    """Collectives over one group. All ranks start them in the same order.

    Buffers come from `allocate` and `extend`; a wire transport also accepts any other buffers.
    """

    name: str
    group: RankGroup
    traffic: Traffic

    def allocate(self, needs: list[BufferRequest], device: torch.device, *, lanes: int = 0) -> list[TransportBuffer]:
        """Allocate zeroed buffers for `needs`, and `lanes` lanes for reductions.

        Transient buffers need `allocate_memory` before use. A lane is the sequence of reductions of one gradient; one
        reduction of a lane is in flight at a time. Collective; called once, with equal `needs` and `lanes` on all
        ranks.
        """
        ...

    def extend(self, needs: list[BufferRequest], device: torch.device, *, lanes: int = 0) -> list[TransportBuffer]:
        """Allocate more zeroed buffers, neither shared nor transient, and append lanes to the existing ones.

        Collective, after `allocate`.
        """
        ...

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
        """Start to sum the ranks' buffers of `lane`.

        The reduction writes this rank's shard of `factor *` the sum to `out`, or adds it to `out` if `add` is set.

        Args:
            out: `[numel / size]`; may be this rank's shard of the buffer.
            elements: Number of payload elements, for traffic counts.
            wire: Dtype in which the parts are sent, unless codecs encode them.
        """
        ...

    def error_feedback(self, lane: int) -> LaneErrors | None:
        """Return the error feedback of a lane's reductions; None if the transport or its options have none."""
        ...

    def publish(self, buffer: TransportBuffer) -> None:
        """Mark this rank's shard of `buffer` as final. Peers may read it until the next `wait_until_read`."""
        ...

    def all_gather(self, buffer: TransportBuffer, *, elements: int, ready: Pending = DONE) -> Pending:
        """Start to all-gather the shards of `buffer`.

        This rank's shard is in place once `ready` has completed. The call publishes the shard of a transient buffer
        that is not shared; other buffers must be published before the call.
        """
        ...

    def board(self) -> AgreementBoard:
        """Return the exchange of small integers by which the group's ranks agree on the collectives to start.

        Called at most once, on all ranks, after `allocate`.
        """
        ...

    def wait_until_read(self, buffer: TransportBuffer) -> None:
        """Block until no peer reads this rank's data in `buffer`: the last published shard, or the input of the last
        reduction."""
        ...

    def free_memory(self, buffer: TransportBuffer) -> None:
        """Free the memory of a transient buffer once no peer reads it. The content is lost.

        Views may be used again after `allocate_memory`.
        """
        ...

    def allocate_memory(self, buffer: TransportBuffer) -> None:
        """Allocate the memory of a transient buffer again, with undefined content."""
        ...


class Reduction(Protocol):
    """Reduction in flight. `squares`: sum of squares of `out`, a float64 scalar; None until the reduction has ended."""

    squares: torch.Tensor | None

    def poll(self) -> bool: ...

    def wait(self) -> None: ...
