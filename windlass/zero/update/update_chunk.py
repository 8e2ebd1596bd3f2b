"""Chunk of a unit: a span of its master weights, gradient and optimizer states, which are updated together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from windlass.storage.slot import Tier
from windlass.zero.core.gradient_slot import GradientSlot
from windlass.zero.core.unit import Unit
from windlass.zero.core.unit_layout import ALIGN, LayoutPiece

_BATCHES = 8  # number of batches of an update on NVMe, unless they would be smaller than `_LEAST_ON_DISK`
_LEAST_ON_DISK = 1 << 20  # elements; smaller transfers do not reach the disk's bandwidth


@dataclass(eq=False)
class UpdateChunk:
    """Elements `[start, stop)` of this rank's state span of a unit, which are updated together.

    Attributes:
        slot: gradient of the unit, with its buffers.
        start, stop: range of elements, counted from the start of the unit's state span.
        tier: tier of master weights and states between steps.
        dtype: dtype of the master weights.
        state_dtype: dtype in which the optimizer computes, and stores states unless it chooses their dtype itself.
        master: `[stop - start]`, on `device`; None while it is only on NVMe.
        gradient: `[stop - start]`, on `device`; None outside an update, and if the unit has no gradient.
        lowered_params: `[stop - start]`, new parameters in the param_dtype, from the update until
            `MasterWeights.write_back`; None if `write_back` casts the master weights instead.
        state_keys: keys of the optimizer's `state` for the states of this chunk.
    """

    slot: GradientSlot
    start: int
    stop: int
    tier: Tier
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    master: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    lowered_params: torch.Tensor | None = None
    state_keys: list[nn.Parameter] = field(default_factory=list)

    @property
    def unit(self) -> Unit:
        return self.slot.unit

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def name(self) -> str:
        """Name of the chunk in reports and errors: the unit's first parameter, and the range of elements."""
        return f"{self.unit.names[0]}[{self.start}:{self.stop}]"

    def pieces(self) -> Iterator[LayoutPiece]:
        """Yield the fragments of parameters in the chunk. Their offsets count from `start`."""
        first = self.unit.state_start
        return self.unit.layout.pieces(first + self.start, first + self.stop)

    @property
    def device(self) -> torch.device:
        """Device on which the chunk is updated."""
        return self.unit.full.device if self.tier is Tier.DEVICE else torch.device("cpu")

    def values(self) -> torch.Tensor:
        """Return the master weights, which must be in memory."""
        assert self.master is not None, f"the master weights of {self.name} are on disk"
        return self.master


@dataclass(frozen=True)
class StateEntry:
    """Fragment of a parameter whose optimizer states this rank stores, under one key of the optimizer's `state`.

    Attributes:
        chunk: chunk that contains the fragment.
        state_key: key of the optimizer's `state`.
        index: index of the parameter in its unit.
        start, stop: range of elements of the flattened parameter.
        shape: shape of those states that have one value per element.
    """

    chunk: UpdateChunk
    state_key: nn.Parameter
    index: int
    start: int
    stop: int
    shape: torch.Size

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return self.chunk.unit.names[self.index]

    @property
    def parameter(self) -> nn.Parameter:
        return self.chunk.unit.parameters[self.index]


def make_chunks(slots: list[GradientSlot], limit: int) -> list[UpdateChunk]:
    """Divide the state spans of units into chunks, in the order of `slots` (one gradient slot per unit).

    A chunk has at most `limit` elements, rounded up to a multiple of 16 (a cache line of float32). The chunks of a unit
    have nearly equal sizes, so that a buffer for one fits the others.
    """
    chunks = []
    for slot in slots:
        span = slot.unit.state_stop - slot.unit.state_start
        size = -(-span // max(1, -(-span // max(limit, 1))))
        size = max(ALIGN, -(-size // ALIGN) * ALIGN)
        for start in range(0, max(span, 1), size):
            tier = slot.unit.state_tier if span else Tier.DEVICE  # an empty chunk needs no memory on any tier
            chunks.append(UpdateChunk(slot, start, min(start + size, span), tier))
    return chunks


def pipeline_numel(slots: list[GradientSlot]) -> int:
    """Return the maximum number of elements of a batch, so that reads, updates and writes of NVMe data overlap.

    An update of NVMe data then has about 8 batches, but the maximum is at least 2**20. Without NVMe data there is no
    limit (2**62). Equal on ranks whose units have equal sizes.
    """
    on_disk = sum(s.unit.state_stop - s.unit.state_start for s in slots if s.unit.state_tier is Tier.NVME)
    return max(_LEAST_ON_DISK, -(-on_disk // _BATCHES)) if on_disk else 1 << 62


def batch_chunks(
    chunks: list[UpdateChunk], limit: int, size_of: Callable[[UpdateChunk], int] = lambda chunk: chunk.numel
) -> list[list[UpdateChunk]]:
    """Divide chunks into batches, from the last chunk to the first.

    The parameters that the next forward uses first are updated last.

    Args:
        limit: maximum size of a batch. A larger chunk is a batch of its own.
        size_of: returns the size of a chunk; its number of elements by default.

    Returns:
        Batches of chunks. All chunks of a batch are on the same tier.
    """
    batches: list[list[UpdateChunk]] = []
    size = 0
    for chunk in reversed(chunks):
        if not batches or size + size_of(chunk) > limit or batches[-1][0].tier is not chunk.tier:
            batches.append([])
            size = 0
        batches[-1].append(chunk)
        size += size_of(chunk)
    return batches
