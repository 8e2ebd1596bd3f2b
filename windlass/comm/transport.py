"""What the core asks of a transport: buffers that peers can reach, and three collectives on cuts of them."""

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
    """How a wire transport sends; shared memory has nothing to choose, each rank reads what it needs.

    Args:
        reduce_chunk: elements of a gradient that travel at once (`reduce_bucket_size`).
        gather_chunk: elements of parameters that travel at once (`allgather_bucket_size`).
        scatter: send each rank only its cut of a sum; else everybody the whole (`reduce_scatter`).
        together: all cuts in one collective; else one broadcast a rank (`allgather_partitions`).
        rotate: each rank begins with another peer (`round_robin_gradients`).
    """

    reduce_chunk: int = 500_000_000
    gather_chunk: int = 500_000_000
    use_reduce_scatter: bool = True
    use_all_gather: bool = True
    rotate_peers: bool = False


@dataclass
class BufferRequest:
    """A buffer to be allocated.

    Args:
        numel: elements, a multiple of the group's size.
        dtype: of the elements.
        common: one buffer for the whole group, each rank owning its cut, where the transport can do that.
        transient: it will be vacated and occupied again.
    """

    numel: int
    dtype: torch.dtype
    shared: bool = False
    transient: bool = False


@dataclass
class OfferMark:
    """The last reduction that was offered from a buffer: its lane and turn; turn 0 is none."""

    lane: int = 0
    turn: int = 0


@dataclass
class TransportBuffer:
    """A flat buffer of this rank and, where the transport maps them, the same buffer of its peers.

    Attributes:
        local: `[numel]`, this rank's.
        parts: every rank's `local` in group order, or empty where peers can't be read.
        common: `local` is the same memory on all ranks.
        key: of its counters.
        published: how often its cuts were published.
        ring: the parts of all buffers that this one may be exchanged with, itself among them.
        place: its place in `ring`; ranks may have the same gradient in different places.
        mark: shared by all cuts of one buffer.
        pages: the memory of `local` where it comes and goes and is this rank's alone; None: it stays.
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
        """The first `numel` elements of it, as the same buffer."""
        return replace(self, local=self.local[:numel])


def local_shard(flat: torch.Tensor, index: int, count: int) -> torch.Tensor:
    """The `index`-th of `count` equal parts of a flat tensor, as a view."""
    size = flat.numel() // count
    return flat.narrow(0, index * size, size)


class Transport(Protocol):
    """Collectives over one group. All ranks start them in one order; buffers come from `allocate`."""

    name: str
    group: RankGroup
    traffic: Traffic

    def allocate(self, needs: list[BufferRequest], device: torch.device, *, lanes: int = 0) -> list[TransportBuffer]:
        """Buffers for `needs`, zeroed, and as many lanes for reductions. Collective: ranks ask for the same, once."""
        ...

    def extend(self, needs: list[BufferRequest], device: torch.device, *, lanes: int = 0) -> list[TransportBuffer]:
        """More buffers, none of them common or transient, and lanes after those there are. Collective, after
        `allocate`."""
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
        """Sum what the ranks offer in `lane`, each from its own buffer; this rank's cut of `factor *` the sum goes to
        (or is added to) `out`.

        Args:
            out: `[numel / size]`; may be this rank's cut of the buffer.
            elements: payload to count.
            wire: dtype in which the parts travel.
        """
        ...

    def publish(self, buffer: TransportBuffer) -> None:
        """Say that this rank's cut of `buffer` is final and may be read until the next `settle`."""
        ...

    def all_gather(self, buffer: TransportBuffer, *, elements: int, ready: Pending = DONE) -> Pending:
        """Bring the others' cuts of `buffer`. This rank's own is in place once `ready`; of a transient buffer it is
        published by this, of others it has to be before."""
        ...

    def board(self) -> AgreementBoard:
        """Where the ranks of the group agree on what they start. Collective, after `allocate`."""
        ...

    def wait_until_read(self, buffer: TransportBuffer) -> None:
        """Block until no peer still reads what this rank last offered in `buffer`."""
        ...

    def free_memory(self, buffer: TransportBuffer) -> None:
        """Give the memory of a transient buffer back once no peer reads it; views stay, their content does not."""
        ...

    def allocate_memory(self, buffer: TransportBuffer) -> None:
        """Take the memory again, content undefined."""
        ...


class Reduction(Protocol):
    """A reduction under way; `squares` is the sum of squares of `out` once it is finished (float64 scalar)."""

    squares: torch.Tensor | None

    def poll(self) -> bool: ...

    def wait(self) -> None: ...
