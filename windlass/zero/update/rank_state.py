"""Optimizer states that differ between data-parallel ranks, and the rules that convert them for another number of
ranks.

[Note: per-rank states] The error feedback of a compressed gradient belongs to one rank: it is the part of its gradients
that its messages have not transmitted yet. Such a state has one value for each element of a parameter on every rank, at
every stage. A checkpoint holds it as one tensor `[ranks, *shape]`. A load on the same number of ranks restores every
row exactly. On another number of ranks the update's rule makes new rows from all saved ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from windlass.zero.core.unit import Unit

RelayRule = Callable[[torch.Tensor, int], torch.Tensor]
"""Maps the saved rows `[saved ranks, n]` and the new number of ranks to the new rows `[ranks, n]`."""


def mean_of_ranks(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    """Give every rank the mean of the saved rows: the mean over ranks stays, as updates with averaged messages need."""
    return rows.mean(0, keepdim=True).expand(ranks, -1)


def share_of_sum(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    """Give every rank an equal share of the sum of the saved rows: the sum over ranks stays."""
    return (rows.sum(0, keepdim=True) / ranks).expand(ranks, -1)


def zeros_on_ranks(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    """Give every rank zeros: the saved rows are dropped."""
    return rows.new_zeros(ranks, rows.shape[1])


@dataclass(frozen=True)
class RankState:
    """One state of one parameter that differs between ranks.

    Attributes:
        index: index of the parameter in its unit.
        key: name of the state.
        values: `[numel]`, the state of this rank; a view of the memory that the update uses. relay: rule for another
        number of ranks.
    """

    unit: Unit
    index: int
    key: str
    values: torch.Tensor
    relay: RelayRule

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return self.unit.names[self.index]

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter."""
        return self.unit.shapes[self.index]
