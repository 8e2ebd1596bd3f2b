"""A plain copy that trains on its own from the first step to the last: how far rounding alone takes two runs apart."""

from __future__ import annotations

import math
from typing import Any

import torch

from windlass.verify.call import Call
from windlass.verify.plain import Plain
from windlass.verify.recorder import Record


class Alone:
    """Takes batches, random numbers and learning rates from the ranks, and nothing else.

    Args:
        plain: the copy.
        limit: gradients are clipped to this norm; 0: they are not.
    """

    def __init__(self, plain: Plain, limit: float) -> None:
        self._plain, self._limit = plain, limit
        self._losses: list[float] = []

    def take_over(self, values: dict[str, torch.Tensor], state: dict[str, Any] | None = None) -> None:
        """Go on from weights, and an optimizer's state, that the script brought."""
        for name, value in values.items():
            self._plain.take_over(name, value)
        if state is not None:
            self._plain.optimizer.load_state_dict(state)

    def replay(self, call: Call, rank: int) -> None:
        """Do a call again."""
        loss = self._plain.replay(call, rank).loss
        self._losses += [loss] if loss is not None else []

    def step(
        self, records: list[Record], options: list[dict[str, Any]], values: dict[str, torch.Tensor], *, applied: bool
    ) -> tuple[float | None, float]:
        """Clip and step with what the replays gave, unless the ranks skipped the step (`applied`).

        Returns:
            The mean loss, and the relative distance from the sharded weights `values`.
        """
        for record in records:
            self._plain.add(record.outside)
        sums, ranks = self._plain.take_sums(), len(records)
        if applied:
            mean = {name: total / (ranks * records[0].scale) for name, total in sums.items()}
            norm = math.sqrt(math.fsum(float(g.square().sum()) for g in mean.values()))
            factor = min(1.0, self._limit / (norm + 1e-6)) if self._limit > 0 else 1.0
            self._plain.step({name: g * factor for name, g in mean.items()}, options)
        losses, self._losses = self._losses, []
        apart = size = 0.0
        for name, own in self._plain.values():
            sharded = values[name].double().cpu()
            apart += float((own.double().cpu() - sharded).square().sum())
            size += float(sharded.square().sum())
        return (sum(losses) / len(losses) if losses else None), math.sqrt(apart / size) if size else 0.0
