"""Independent plain run, which shows how far rounding alone separates two runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from windlass.verify.recorded_forward import RecordedForward
from windlass.verify.reference_model import ReferenceModel
from windlass.verify.step_recorder import StepRecord


class IndependentRun:
    """Unsharded copy that trains from the first step to the last. It takes over only weights that the script sets or
    loads.

    Batches, random states, optimizer options and the decisions to skip steps are those of the sharded run. So are the
    gradients at which a replayed backward begins: those of the model's outputs, and of parameters that the loss uses
    directly. An error in a loss that is computed outside of the model therefore affects both runs equally.

    Args:
        reference: the unsharded copy.
        gradient_clipping: function that returns the maximum gradient norm of the current step; 0: no clipping.
    """

    def __init__(self, reference: ReferenceModel, gradient_clipping: Callable[[], float]) -> None:
        self._reference, self._gradient_clipping = reference, gradient_clipping
        self._losses: list[float] = []

    def load_values(self, values: dict[str, torch.Tensor], state: dict[str, Any] | None = None) -> None:
        """Continue from weights that the script set or loaded. `state`: loaded optimizer state; None: not loaded."""
        for name, value in values.items():
            self._reference.set_value(name, value)
        if state is not None:
            self._reference.optimizer.load_state_dict(state)

    def replay(self, forward: RecordedForward, rank: int) -> None:
        """Replay a forward and its backward."""
        loss = self._reference.replay(forward, rank).loss
        self._losses += [loss] if loss is not None else []

    def step(
        self,
        records: list[StepRecord],
        options: list[dict[str, Any]],
        values: dict[str, torch.Tensor],
        *,
        names: set[str],
        factor: float,
        applied: bool,
    ) -> tuple[float | None, float]:
        """Clip the gradients of the replays and step, unless the ranks skipped the step (`applied` is False).

        Args:
            names: parameters that the optimizer steps.
            factor: number by which the sum of the ranks' gradients is multiplied: 1 / ranks for their mean.

        Returns:
            `(loss, distance)`: the mean loss of the replays, None if they have none, and the distance of the weights
            from the sharded weights `values`, relative to the norm of `values`.
        """
        for record in records:
            self._reference.add_gradients(record.outside_gradients)
        sums, weight = self._reference.take_gradient_sums(), factor / records[0].loss_scale
        if applied:
            reduced = {name: total * weight for name, total in sums.items() if name in names}
            norm = math.sqrt(math.fsum(float(g.square().sum()) for g in reduced.values()))
            limit = self._gradient_clipping()
            clip = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
            self._reference.step({name: g * clip for name, g in reduced.items()}, options)
        losses, self._losses = self._losses, []
        apart = size = 0.0
        for name, own in self._reference.named_master_weights():
            sharded = values[name].double().cpu()
            apart += float((own.double().cpu() - sharded).square().sum())
            size += float(sharded.square().sum())
        return (sum(losses) / len(losses) if losses else None), math.sqrt(apart / size) if size else 0.0
