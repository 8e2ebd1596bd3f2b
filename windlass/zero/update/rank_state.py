"""Optimizer states that differ between data-parallel ranks, and the rules that convert them for another number of
ranks.

[Note: per-rank states] The error feedback of a compressed gradient belongs to one rank: it is the part of the rank's
gradients that its messages have not transmitted yet. A per-rank state usually has one value for each element of a
parameter on every rank, at every stage. A checkpoint holds the state as one tensor `[ranks, *shape]`. A load on the
same number of ranks restores every row exactly, unless the state `follows_owners`. On another number of ranks the
state's rule computes new rows from all saved rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from windlass.storage.slot import Tier
from windlass.zero.core.unit import Unit
from windlass.zero.update.rank_state_memory import RankStateMemory

RelayRule = Callable[[torch.Tensor, int], torch.Tensor]
"""Computes new rows `[ranks, n]` from the saved rows `[saved ranks, n]` and the new number of ranks."""


def mean_of_ranks(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    """Give every rank the mean of the saved rows. Updates that average messages need an unchanged mean over ranks."""
    return rows.mean(0, keepdim=True).expand(ranks, -1)


def share_of_sum(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    """Give every rank an equal share of the sum of the saved rows. The sum over ranks stays the same."""
    return (rows.sum(0, keepdim=True) / ranks).expand(ranks, -1)


def largest_of_ranks(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    """Give every rank the elementwise maximum of the saved rows, e.g. for a count that is equal on all ranks."""
    return rows.amax(0, keepdim=True).expand(ranks, -1)


def zeros_on_ranks(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    """Give every rank zeros: the saved rows are dropped."""
    return rows.new_zeros(ranks, rows.shape[1])


@dataclass(frozen=True)
class RankState:
    """One state of one parameter that differs between ranks.

    Attributes:
        index: index of the parameter in its unit.
        key: name of the state.
        values: `[numel]`, the state of this rank; a view of the memory that the update uses.
        relay: rule for a load on another number of ranks.
        follows_owners: True if the rule also applies on the same number of ranks, because a rank may own other elements
            than in the saved run.
        tier: tier that holds the state.
    """

    unit: Unit
    index: int
    key: str
    values: torch.Tensor
    relay: RelayRule
    follows_owners: bool = False
    tier: Tier = Tier.DEVICE

    @property
    def is_in_memory(self) -> bool:
        """True if `values` contains the state; False if it is a meta tensor."""
        return True

    def read(self) -> torch.Tensor:
        """Return the values `[numel]`, or a copy of them."""
        return self.values

    @property
    def nbytes(self) -> int:
        """Bytes that the state takes on this rank."""
        return self.values.nbytes

    def set(self, values: torch.Tensor) -> None:
        """Replace the state by `values`, `[numel]`."""
        self.values.copy_(values)

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return self.unit.names[self.index]

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter, or of the part that this rank has."""
        return self.unit.shapes[self.index]

    @property
    def full_shape(self) -> torch.Size:
        """Shape of the full parameter."""
        return torch.Size(self.unit.placements[self.index].global_shape)


@dataclass(frozen=True)
class OwnedRankState(RankState):
    """State that a rank keeps only for the elements that it owns. `values` is a copy with zeros for other elements.

    Attributes:
        owned: first element and memory of each part that this rank owns.
    """

    owned: tuple[tuple[int, torch.Tensor], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that the state takes on this rank."""
        return sum(part.nbytes for _, part in self.owned)

    def set(self, values: torch.Tensor) -> None:
        """Replace the state by the owned elements of `values`, `[numel]`."""
        super().set(values)
        for start, part in self.owned:
            part.copy_(values[start : start + part.numel()])


@dataclass(frozen=True)
class StoredRankState(RankState):
    """Offloaded state. `values` is a meta tensor `[numel]`.

    Attributes:
        memory: memory that stores the state.
        start: first element of the parameter in the unit.
    """

    memory: RankStateMemory = field(kw_only=True)
    start: int = field(kw_only=True)

    @property
    def is_in_memory(self) -> bool:
        """False: `read` copies the values to memory."""
        return False

    def read(self) -> torch.Tensor:
        """Return a copy of the values in host memory."""
        return self.memory.read_part(self.key, self.unit, self.start, self.values.numel())

    def set(self, values: torch.Tensor) -> None:
        """Replace the state by `values`, `[numel]`."""
        self.memory.write_part(self.key, self.unit, self.start, values)


class RankNumber(RankState):
    """Per-rank state that is one number for a parameter: `values` is `[1]`."""

    @property
    def shape(self) -> torch.Size:
        """Shape of a scalar, `[]`."""
        return torch.Size([])

    @property
    def full_shape(self) -> torch.Size:
        """Shape of a scalar, `[]`."""
        return torch.Size([])
