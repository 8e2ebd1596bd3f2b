"""The part of a unit that is updated at once: a span of its master weights, gradient and optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from windlass.storage.slot import Tier
from windlass.zero.core.gradient_slot import GradientSlot
from windlass.zero.core.unit import Unit
from windlass.zero.core.unit_layout import ALIGN, LayoutPiece

_BATCHES = 8  # of an update on disk, if they are not too small for the disk
_LEAST_ON_DISK = 1 << 20  # elements


@dataclass(eq=False)
class UpdateChunk:
    """Elements `[start, stop)` of this rank's update of a unit.

    Attributes:
        start, stop: within the unit's state span.
        tier: tier of master weights and states between steps.
        dtype: dtype of the master weights.
        state_dtype: dtype of the update and of the states.
        master: `[stop - start]`, in the memory where it is updated; None while it is on disk.
        gradient: `[stop - start]`, in the same memory; None while it is not resident.
        lowered_params: `[stop - start]`, new parameters in the param_dtype, if the update itself wrote them.
        state_keys: keys of the optimizer's `state` for this chunk.
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
        """For messages."""
        return f"{self.unit.names[0]}[{self.start}:{self.stop}]"

    def pieces(self) -> Iterator[LayoutPiece]:
        """The parts of parameters in it; offsets count from `start`."""
        first = self.unit.state_start
        return self.unit.layout.pieces(first + self.start, first + self.stop)

    @property
    def device(self) -> torch.device:
        """Device on which the chunk is updated."""
        return self.unit.full.device if self.tier is Tier.DEVICE else torch.device("cpu")

    def values(self) -> torch.Tensor:
        """The master weights, which must be at hand."""
        assert self.master is not None, f"the master weights of {self.name} are on disk"
        return self.master


@dataclass(frozen=True)
class StateEntry:
    """State entry of a chunk: elements `[start, stop)` of one of the unit's parameters.

    Attributes:
        shape: shape of a state with one value per element.
    """

    chunk: UpdateChunk
    state_key: nn.Parameter
    index: int
    start: int
    stop: int
    shape: torch.Size

    @property
    def name(self) -> str:
        """The parameter's."""
        return self.chunk.unit.names[self.index]

    @property
    def parameter(self) -> nn.Parameter:
        return self.chunk.unit.parameters[self.index]


def make_chunks(slots: list[GradientSlot], limit: int) -> list[UpdateChunk]:
    """The chunks of all trainable units in model order, none of more than `limit` elements (rounded up to a cache
    line), and those of one unit of nearly one size: memory for one serves the others."""
    found = []
    for slot in slots:
        span = slot.unit.state_stop - slot.unit.state_start
        size = -(-span // max(1, -(-span // max(limit, 1))))
        size = max(ALIGN, -(-size // ALIGN) * ALIGN)
        for start in range(0, max(span, 1), size):
            home = slot.unit.state_tier if span else Tier.DEVICE  # nothing takes no room anywhere
            found.append(UpdateChunk(slot, start, min(start + size, span), home))
    return found


def pipeline_numel(slots: list[GradientSlot]) -> int:
    """Elements of a batch such that there are several to read, update and write at a time; the same on all ranks. No
    bound where nothing rests on disk."""
    on_disk = sum(s.unit.state_stop - s.unit.state_start for s in slots if s.unit.state_tier is Tier.NVME)
    return max(_LEAST_ON_DISK, -(-on_disk // _BATCHES)) if on_disk else 1 << 62


def batch_chunks(
    chunks: list[UpdateChunk], limit: int, size_of: Callable[[UpdateChunk], int] = lambda chunk: chunk.numel
) -> list[list[UpdateChunk]]:
    """Chunks from the last to the first (what the next forward wants first is updated last), of one home and at most
    `limit` elements each, as `size_of` counts them."""
    made: list[list[UpdateChunk]] = []
    size = 0
    for chunk in reversed(chunks):
        if not made or size + size_of(chunk) > limit or made[-1][0].tier is not chunk.tier:
            made.append([])
            size = 0
        made[-1].append(chunk)
        size += size_of(chunk)
    return made
