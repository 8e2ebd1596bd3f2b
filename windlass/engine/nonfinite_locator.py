"""Locator of the first non-finite gradient: parameter, rank and micro-batch."""

from __future__ import annotations

import torch

from windlass.comm.rank_group import RankGroup
from windlass.zero.core.unit import Unit


class NonFiniteLocator:
    """Recorder of the sum of each gradient, to find the first gradient that is not finite.

    Args:
        group: the ranks to search.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._gradient_sums: list[tuple[int, str, torch.Tensor]] = []
        self.micro_batch = 0

    def record(self, unit: Unit, index: int, gradient: torch.Tensor) -> None:
        """Record the sum of a gradient. The sum is copied to the host only after an overflow."""
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        self._gradient_sums.append((self.micro_batch, unit.names[index], values.sum(dtype=torch.float32)))

    def clear(self) -> None:
        """Drop the records at the end of a step."""
        self._gradient_sums.clear()

    def locate(self) -> str:
        """Return a phrase that names the first non-finite gradient. Collective.

        If all gradients are finite on each rank, the phrase names their sum over ranks.
        """
        local = next(
            (
                (micro, place, name)
                for place, (micro, name, total) in enumerate(self._gradient_sums)
                if not torch.isfinite(total)
            ),
            None,
        )
        of_ranks = self._group.all_gather_object(local)
        bad = sorted(
            (micro, place, rank, name) for rank, one in enumerate(of_ranks) if one for micro, place, name in [one]
        )
        if not bad:
            return "in the sum over ranks, where each rank's own gradient was finite"
        micro, _, rank, name = bad[0]
        return f"first in the gradient of {name!r} on rank {self._group.ranks[rank]}, micro-batch {micro}"
