"""The one small reduction before a step: norm, overflow, which parameters were used, what is still to be reduced."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from windlass.base.activity import During
from windlass.comm.groups import Group
from windlass.comm.ordered_sum import sum_of_squares
from windlass.comm.traffic import Traffic
from windlass.zero.gradient_slot import GradientSlot
from windlass.zero.gradients import Gradients


@dataclass(frozen=True)
class Verdict:
    """What all ranks know before they step.

    Attributes:
        norm: of the whole gradient, loss scale included; not finite if any element is not.
        used: for each trainable unit and parameter, whether any rank had a gradient of it.
        unreduced: for each trainable unit, whether any rank holds gradients that were not reduced.
        flags: sums over ranks of what else they had to say.
    """

    norm: float
    used: list[list[bool]]
    unreduced: list[bool]
    flags: list[float]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.norm)


def share_of_norm(slot: GradientSlot, data: Group, shard_count: int) -> tuple[int, int]:
    """`[start, stop)` of a slot's shard whose squares this rank adds, so that each element counts once over all
    ranks."""
    size = slot.numel
    parts = data.size if size == slot.unit.layout.padded else data.size // shard_count
    place = data.index if size == slot.unit.layout.padded else data.index // shard_count
    return place * size // parts, (place + 1) * size // parts


def agree(gradients: Gradients, data: Group, shard_count: int, traffic: Traffic, *, flags: list[float]) -> Verdict:
    """Reduce the verdict over all data ranks. Collective; reductions under way must be finished.

    Args:
        gradients: of this rank.
        data: all data ranks.
        shard_count: over how many of them gradients are cut.
        flags: numbers to add up over ranks on the same trip.
    """
    slots = gradients.slots
    squares = []
    for slot in slots:
        if slot.holds:
            if slot.squares is None:  # as a rule it was measured when the unit was reduced
                start, stop = share_of_norm(slot, data, shard_count)
                slot.squares = sum_of_squares(slot.read()[start:stop])
            squares.append(slot.squares)
    device = slots[0].unit.full.device if slots else torch.device("cpu")
    facts: list[float] = [float(pending) for pending in gradients.unreduced()]
    for slot in slots:
        facts += [float(index in slot.used) for index in range(len(slot.unit.parameters))]
    facts += flags
    none = torch.zeros((), dtype=torch.float64, device=device)
    total = torch.stack([none, *(one.to(device) for one in squares)]).sum()
    vector = torch.cat([total.reshape(1), torch.tensor(facts, dtype=torch.float64, device=device)])
    with During("agreement of the step"):
        if data.size > 1:
            dist.all_reduce(vector, group=data.process_group)
            traffic.control += vector.numel()
        return _read(vector.tolist(), slots)


def _read(values: list[float], slots: list[GradientSlot]) -> Verdict:
    count = len(slots)
    norm = math.sqrt(values[0]) if values[0] >= 0 else math.nan
    unreduced = [value > 0 for value in values[1 : 1 + count]]
    used, at = [], 1 + count
    for slot in slots:
        size = len(slot.unit.parameters)
        used.append([value > 0 for value in values[at : at + size]])
        at += size
    return Verdict(norm, used, unreduced, values[at:])


def clip_coefficient(norm: float, limit: float) -> float:
    """The factor by which gradients of this norm are clipped to `limit`, as torch's `clip_grad_norm_` does; 0: no
    limit."""
    if limit <= 0:
        return 1.0
    coefficient = limit / (norm + 1e-6)
    return coefficient if coefficient < 1.0 or math.isnan(coefficient) else 1.0
