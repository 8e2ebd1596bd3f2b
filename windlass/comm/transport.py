"""Interface of transports: buffers that peers can reach, and collectives on shards of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from windlass.base.pending import DONE, Pending
from windlass.comm.agreement_board import AgreementBoard
from windlass.comm.anonymous_pages import AnonymousPages
from windlass.comm.rank_group import RankGroup
from windlass.comm.traffic import Traffic


@dataclass(frozen=True)
class WireOptions:
    """Options of network transports. Shared memory has no options, because each rank reads what it needs.

    Args:
        reduce_chunk: elements of a gradient in one message (`reduce_bucket_size`).
        gather_chunk: elements of parameters in one message (`allgather_bucket_size`).
        use_reduce_scatter: send each rank only its shard of a sum; otherwise the whole sum (`reduce_scatter`).
        use_all_gather: all shards in one collective; otherwise one broadcast per rank (`allgather_partitions`).
        rotate_peers: each rank begins with a different peer (`round_robin_gradients`).
    """

    reduce_chunk: int = 500_000_000
    gather_chunk: int = 500_000_000
    use_reduce_scatter: bool = True
    use_all_gather: bool = True
    rotate_peers: bool = False


@dataclass
class BufferRequest:
    """Request for a buffer.

    Args:
        numel: elements, a multiple of the group's size.
        dtype: dtype of the elements.
        shared: one buffer for the whole group, in which each rank writes its shard, if the transport supports
            that.
        transient: its memory will be freed and allocated again.
    """

    numel: int
    dtype: torch.dtype
    shared: bool = False
    transient: bool = False


@dataclass
class OfferMark:
    """Last reduction that was offered from a buffer: its lane and turn; turn 0 means none."""

    lane: int = 0
    turn: int = 0


@dataclass
class TransportBuffer:
    """Flat buffer of this rank and, if the transport maps them, the same buffer of its peers.

    Attributes:
        local: `[numel]`, this rank's.
        parts: every rank's `local` in group order, or empty if peers cannot be read.
        shared: `local` is the same memory on all ranks.
        key: index of its first counter.
        published: number of times that its shards were published.
        ring: parts of all buffers of its ring, including this one.
        ring_index: its index in `ring`; ranks may hold the same gradient at different indices.
        mark: last offer, common to all views of one buffer.
        pages: private memory of `local` that is freed and allocated again; None: it is permanent.
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

    def first(self, numel: int) -> TransportBuffer:
        """Return a view of the first `numel` elements as the same buffer."""
        return replace(self, local=self.local[:numel])


def local_shard(flat: torch.Tensor, index: int, count: int) -> torch.Tensor:
    """Return the `index`-th of `count` equal parts of a flat tensor, as a view."""
    size = flat.numel() // count
    return flat.narrow(0, index * size, size)


class Transport(Protocol):
    """Collectives over one group. All ranks start them in one order; buffers come from `allocate`."""

    name: str
    group: RankGroup
    traffic: Traffic

    def allocate(self, needs: list[BufferRequest], device: torch.device, *, lanes: int = 0) -> list[TransportBuffer]:
        """Allocate zeroed buffers for `needs`, and lanes for reductions. Collective: all ranks make the same
        requests, once.
        """
        ...

    def extend(self, needs: list[BufferRequest], device: torch.device, *, lanes: int = 0) -> list[TransportBuffer]:
        """Allocate more buffers (neither shared nor transient), and more lanes. Collective, after `allocate`."""
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
        """Sum the buffers that the ranks offer in `lane`. This rank's shard of `factor *` the sum is written or
        added to `out`.

        Args:
            out: `[numel / size]`; may be this rank's shard of the buffer.
            elements: payload to count.
            wire: dtype in which the parts are sent.
        """
        ...

    def publish(self, buffer: TransportBuffer) -> None:
        """Allow peers to read this rank's shard of `buffer` until the next `wait_until_read`."""
        ...

    def all_gather(self, buffer: TransportBuffer, *, elements: int, ready: Pending = DONE) -> Pending:
        """All-gather `buffer`. This rank's shard is in place once `ready` is done.

        A transient buffer is published by this call; publish others before it.
        """
        ...

    def board(self) -> AgreementBoard:
        """Return the board on which ranks agree on their collectives. Collective, after `allocate`."""
        ...

    def wait_until_read(self, buffer: TransportBuffer) -> None:
        """Block until no peer still reads this rank's last offer in `buffer`."""
        ...

    def free_memory(self, buffer: TransportBuffer) -> None:
        """Free the memory of a transient buffer once no peer reads it. Views stay valid objects but lose their
        content.
        """
        ...

    def allocate_memory(self, buffer: TransportBuffer) -> None:
        """Allocate the memory again, with undefined content."""
        ...


class Reduction(Protocol):
    """Reduction in flight. `squares` is the sum of squares of `out` once it is complete (float64 scalar)."""

    squares: torch.Tensor | None

    def poll(self) -> bool: ...

    def wait(self) -> None: ...
