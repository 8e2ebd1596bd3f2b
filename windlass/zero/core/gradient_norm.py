"""The one small reduction before a step: norm, overflow, which parameters were used, what is still to be reduced."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from windlass.base.collective_activity import WaitScope
from windlass.comm.mesh import Mesh
from windlass.comm.ordered_sum import sum_of_squares
from windlass.comm.traffic import Traffic
from windlass.zero.core.gradient_reducer import GradientReducer
from windlass.zero.core.gradient_slot import GradientSlot
from windlass.zero.core.sharding_policy import ShardingPolicy


@dataclass(frozen=True)
class StepStatus:
    """What all ranks know before they step.

    Attributes:
        norm: of the whole gradient, loss scale included; not finite if any element is not.
        used: for each trainable unit and parameter, whether any rank had a gradient of it.
        unreduced: for each trainable unit, whether any rank holds gradients that were not reduced.
        flags: sums over ranks of what else they had to say.
        uneven: the data ranks made different numbers of backwards.
        diverged: they reduced and dropped gradients in different orders, see [Note: dropped gradients].
    """

    norm: float
    used: list[list[bool]]
    unreduced: list[bool]
    flags: list[float]
    uneven: bool
    diverged: bool

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.norm)


class NormVector:
    """Where in the vector it stands whether the parameters of each unit were used.

    Experts that are modules of their own are others on each rank along ep, and more or fewer: each has a place. Those
    that lie in one parameter are used where any of them is.

    Args:
        mesh: all ranks.
        device: where collectives take what is said.

    Attributes:
        of: the first place of each slot's parameters.
        size: of the vector.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._ep, self.device = mesh.ep, device
        self.of: list[int] = []
        self.size = 0

    def fit(self, slots: list[GradientSlot]) -> None:
        """Have places for these, which are as many on all ranks that are asked. Collective where that is new."""
        if len(slots) == len(self.of):
            return
        self.of, self.size = [], len(slots)
        counts = [len(slot.unit.parameters) for slot in slots]
        apart = [slot.unit.kind.is_expert and slot.unit.placements[0].is_full for slot in slots]
        if self._ep.size == 1 or not any(apart):
            for count in counts:
                self.of.append(self.size)
                self.size += count
            return
        everywhere = self._ep.all_gather_object(counts)
        for number, separate in enumerate(apart):
            along = [theirs[number] for theirs in everywhere]
            self.of.append(self.size + (sum(along[: self._ep.index]) if separate else 0))
            self.size += sum(along) if separate else counts[number]


def local_norm_squares(slot: GradientSlot, policy: ShardingPolicy) -> tuple[int, int]:
    """`[start, stop)` of a slot's shard whose squares this rank adds, so that each element counts once over the data
    ranks of its family."""
    data, size = slot.unit.dp_group.mesh.data, slot.numel
    cuts = slot.unit.dp_group.group.size if policy.state else data.size
    parts = data.size if size == slot.unit.layout.padded else data.size // cuts
    place = data.index if size == slot.unit.layout.padded else data.index // cuts
    return place * size // parts, (place + 1) * size // parts


def reduce_step_status(
    gradients: GradientReducer,
    policy: ShardingPolicy,
    mesh: Mesh,
    vector: NormVector,
    traffic: Traffic,
    *,
    flags: list[float],
) -> StepStatus:
    """Reduce the verdict. Collective; reductions under way must be finished.

    Which parameters were used, and what is not reduced, the dense data ranks agree on among themselves; norm and flags
    all ranks.

    Args:
        gradients: of this rank.
        policy: over which ranks they are cut.
        mesh: all ranks.
        places: of what is said of each parameter.
        flags: numbers to add up over ranks on the same trip.
    """
    slots = gradients.slots
    squares = []
    for slot in slots:
        if slot.has_reduced:
            if slot.norm_squares is None:  # as a rule it was measured when the unit was reduced
                if gradients.keeps_local_gradients:  # the mean square over ranks, see [Note: local gradients]
                    slot.norm_squares = sum_of_squares(slot.read()) / mesh.dense.data.size
                else:
                    start, stop = local_norm_squares(slot, policy)
                    slot.norm_squares = sum_of_squares(slot.read()[start:stop])
            squares.append(
                slot.norm_squares * slot.unit.norm_weight if slot.unit.norm_weight != 1.0 else slot.norm_squares
            )
    device = vector.device
    vector.fit(slots)
    facts = torch.zeros(vector.size + 4, dtype=torch.float64)
    for number, (slot, pending) in enumerate(zip(slots, gradients.unreduced(), strict=True)):
        facts[number] = float(pending)
        for index in slot.used:
            facts[vector.of[number] + index] = 1.0
    backwards, events = gradients.backward_count, gradients.history_hash
    facts[vector.size :] = torch.tensor([backwards, backwards**2, events, events**2], dtype=torch.float64)
    none = torch.zeros((), dtype=torch.float64, device=device)
    total = torch.stack([none, *(one.to(device) for one in squares)]).sum()
    reduced = torch.cat([total.reshape(1), torch.tensor(flags, dtype=torch.float64, device=device), facts.to(device)])
    with WaitScope("agreement of the step"):
        _reduce(reduced, 1 + len(flags), mesh, traffic)
    values = reduced.tolist()
    norm = math.sqrt(values[0]) if values[0] >= 0 else math.nan
    found = values[1 + len(flags) :]
    used = [
        [value > 0 for value in found[start : start + len(slot.unit.parameters)]]
        for slot, start in zip(slots, vector.of, strict=True)
    ]
    unreduced = [value > 0 for value in found[: len(slots)]]
    ranks, (made, of_made, history, of_history) = mesh.dense.data.size, found[vector.size :]
    return StepStatus(
        norm,
        used,
        unreduced,
        values[1 : 1 + len(flags)],
        uneven=_values_differ(made, of_made, ranks),
        diverged=_values_differ(history, of_history, ranks),
    )


def _values_differ(total: float, squares: float, ranks: int) -> bool:
    """Whether the integers of which this is the sum over ranks, and that of their squares, differ."""
    return total * total != squares * ranks


def _reduce(vector: torch.Tensor, common: int, mesh: Mesh, traffic: Traffic) -> None:
    """Add up the first `common` numbers over all ranks, the others over the dense data ranks."""
    data = mesh.dense.data
    if data.size == mesh.world.size:
        if data.size > 1:
            dist.all_reduce(vector, group=data.process_group)
            traffic.control += vector.numel()
        return
    if data.size > 1 and vector.numel() > common:
        dist.all_reduce(vector[common:], group=data.process_group)
    dist.all_reduce(vector[:common], group=mesh.world.process_group)
    traffic.control += vector.numel()


def clip_coefficient(norm: float, limit: float) -> float:
    """The factor by which gradients of this norm are clipped to `limit`, as torch's `clip_grad_norm_` does; 0: no
    limit."""
    if limit <= 0:
        return 1.0
    coefficient = limit / (norm + 1e-6)
    return coefficient if coefficient < 1.0 or math.isnan(coefficient) else 1.0
