"""Says which parameter's gradient stopped being finite first: on which rank, in which micro-batch."""

from __future__ import annotations

import torch
import torch.distributed as dist

from windlass.comm.rank_group import RankGroup
from windlass.zero.core.unit import Unit


class NonFiniteLocator:
    """Watches gradients as they arrive; costs one sum of each.

    Args:
        data: the ranks to ask.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._gradient_sums: list[tuple[int, str, torch.Tensor]] = []
        self.micro_batch = 0

    def record(self, unit: Unit, index: int, gradient: torch.Tensor) -> None:
        """Remember whether a gradient is finite; read only when something overflowed."""
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        self._gradient_sums.append((self.micro_batch, unit.names[index], values.sum(dtype=torch.float32)))

    def clear(self) -> None:
        """A step ended."""
        self._gradient_sums.clear()

    def locate(self) -> str:
        """A phrase that names the first bad gradient over all ranks; empty if none was seen. Collective."""
        mine = next(
            (
                (micro, place, name)
                for place, (micro, name, total) in enumerate(self._gradient_sums)
                if not torch.isfinite(total)
            ),
            None,
        )
        found: list[tuple[int, int, str] | None] = [None] * self._group.size
        dist.all_gather_object(found, mine, group=self._group.process_group)
        bad = sorted(
            (micro, place, rank, name) for rank, one in enumerate(found) if one for micro, place, name in [one]
        )
        if not bad:
            return "in the sum over ranks, where each rank's own gradient was finite"
        micro, _, rank, name = bad[0]
        return f"first in the gradient of {name!r} on rank {self._group.ranks[rank]}, micro-batch {micro}"
