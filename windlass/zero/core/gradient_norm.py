"""Small reduction before a step: gradient norm, overflow, used parameters, and unreduced units."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from windlass.base.collective_activity import WaitScope
from windlass.comm.mesh import Mesh
from windlass.comm.ordered_sum import sum_of_squares
from windlass.comm.traffic import Traffic
from windlass.zero.core.gradient_reducer import GradientReducer
from windlass.zero.core.gradient_slot import GradientSlot
from windlass.zero.core.sharding_policy import ShardingPolicy


@dataclass(frozen=True)
class StepStatus:
    """Result of the reduction before a step.

    Attributes:
        norm: Norm of the full gradient of the optimizer's parameters, including the loss scale; not finite if any
            element is not finite, or if the sum of squares overflows.
        used: For each trainable unit and parameter, True if any data rank had a gradient of it.
        unreduced: For each trainable unit, True if any data rank holds unreduced gradients of it.
        flags: Sums over ranks of the additional flags.
        uneven: True if the data ranks ran different numbers of backwards.
        diverged: True if ranks that shard the same gradients reduced and dropped them in different orders, see
            [Note: dropped gradients].
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
    """Layout of the flags of units and parameters in the vector that `reduce_step_status` sums over ranks.

    Experts that are separate modules differ between ranks along ep, also in number, so each expert has separate flags.
    Experts that are slices of one parameter share a flag: the parameter is used if any of them is.

    Args:
        mesh: Mesh of all ranks.
        device: Device of the collectives.

    Attributes:
        of: For each slot, the index of the flag of its first parameter among the flags.
        size: Number of flags: an unreduced flag for each unit, then a used flag for each parameter.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._ep, self.device = mesh.ep, device
        self.of: list[int] = []
        self.size = 0

    def fit(self, slots: list[GradientSlot]) -> None:
        """Rebuild the layout for `slots` if their number changed. Collective over the `ep` axis in that case.

        The number of slots is equal on all dense data ranks.
        """
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
        all_counts = self._ep.all_gather_object(counts)
        for number, separate in enumerate(apart):
            along = [theirs[number] for theirs in all_counts]
            self.of.append(self.size + (sum(along[: self._ep.index]) if separate else 0))
            self.size += sum(along) if separate else counts[number]


def local_norm_squares(slot: GradientSlot, policy: ShardingPolicy) -> tuple[int, int]:
    """Return the range `[start, stop)` of a slot's shard whose squares this rank adds to the gradient norm.

    Over the data ranks of the slot's group, each element counts once.
    """
    data, size = slot.unit.dp_group.mesh.data, slot.numel
    num_shards = slot.unit.dp_group.group.size if policy.state else data.size
    parts = data.size if size == slot.unit.layout.padded else data.size // num_shards
    place = data.index if size == slot.unit.layout.padded else data.index // num_shards
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
    """Reduce the step status. Collective; reductions in flight must be finished before.

    Used parameters and unreduced units are combined over the dense data ranks, norm and flags over all ranks.

    Args:
        gradients: Gradient reducer of this rank.
        policy: Sharding policy of the gradients.
        mesh: Mesh of all ranks.
        vector: Layout of the reduced vector.
        traffic: Counter of the elements sent.
        flags: Further numbers to sum over ranks in the same collective.
    """
    slots = gradients.slots
    squares = []
    for slot in slots:
        if slot.has_reduced and not slot.unit.unstepped:
            own = _norm_squares(slot, gradients, policy, mesh)
            squares.append(own * slot.unit.norm_weight if slot.unit.norm_weight != 1.0 else own)
    device = vector.device
    vector.fit(slots)
    # Replicas (MiCS) may reduce in different orders, so only the ranks of one replica are compared.
    replicas, replica = (mesh.dense.replicate.size, mesh.dense.replicate.index) if policy.state else (1, 0)
    # use float64, so that counts and squares of hashes are exact
    facts = torch.zeros(vector.size + 2 + 2 * replicas, dtype=torch.float64)
    for number, (slot, pending) in enumerate(zip(slots, gradients.unreduced(), strict=True)):
        facts[number] = float(pending)
        for index in slot.used:
            facts[vector.of[number] + index] = 1.0
    backwards, events = gradients.backward_count, gradients.history_hash
    # The sum and the sum of squares suffice to compare the values of all ranks (see `_values_differ`).
    facts[vector.size : vector.size + 2] = torch.tensor([backwards, backwards**2], dtype=torch.float64)
    facts[vector.size + 2 :].view(replicas, 2)[replica] = torch.tensor([events, events**2], dtype=torch.float64)
    none = torch.zeros((), dtype=torch.float64, device=device)
    total = torch.stack([none, *(one.to(device) for one in squares)]).sum()
    reduced = torch.cat([total.reshape(1), torch.tensor(flags, dtype=torch.float64, device=device), facts.to(device)])
    with WaitScope("agreement of the step"):
        _reduce(reduced, 1 + len(flags), mesh, traffic)
    values = reduced.tolist()
    norm = math.sqrt(values[0]) if values[0] >= 0 else math.nan
    unit_values = values[1 + len(flags) :]
    used = [
        [value > 0 for value in unit_values[start : start + len(slot.unit.parameters)]]
        for slot, start in zip(slots, vector.of, strict=True)
    ]
    unreduced = [value > 0 for value in unit_values[: len(slots)]]
    ranks, (made, of_made, *histories) = mesh.dense.data.size, unit_values[vector.size :]
    return StepStatus(
        norm,
        used,
        unreduced,
        values[1 : 1 + len(flags)],
        uneven=_values_differ(made, of_made, ranks),
        diverged=any(
            _values_differ(history, of_history, ranks // replicas)
            for history, of_history in zip(histories[::2], histories[1::2], strict=True)
        ),
    )


def _norm_squares(slot: GradientSlot, gradients: GradientReducer, policy: ShardingPolicy, mesh: Mesh) -> torch.Tensor:
    """Return this rank's part of the squared norm of a unit, without parameters in no group of the optimizer."""
    unit, local = slot.unit, gradients.keeps_local_gradients
    if slot.norm_squares is not None and not unit.outside:  # usually computed during the reduction of the unit
        return slot.norm_squares
    values = slot.read()
    begin, (start, stop) = (0, (0, values.numel())) if local else (unit.state_start, local_norm_squares(slot, policy))
    # The mean square over ranks, see [Note: local gradients].
    ranks = mesh.dense.data.size if local else 1
    if not unit.outside:
        slot.norm_squares = sum_of_squares(values[start:stop]) / ranks
        return slot.norm_squares
    squares = torch.zeros((), dtype=torch.float64, device=values.device)
    for piece in unit.layout.pieces(begin + start, begin + stop):
        if piece.index not in unit.outside:
            squares += sum_of_squares(values.narrow(0, start + piece.offset, piece.numel))
    return squares / ranks


def _values_differ(total: float, squares: float, ranks: int) -> bool:
    """Return True if the ranks' integers differ, given their sum over ranks and the sum of their squares."""
    # Equality in the Cauchy-Schwarz inequality holds only if all integers are equal.
    return total * total != squares * ranks


def _reduce(vector: torch.Tensor, common: int, mesh: Mesh, traffic: Traffic) -> None:
    """Sum the first `common` numbers over all ranks, and the others over the dense data ranks."""
    data = mesh.dense.data
    # If all ranks are data ranks, one all-reduce is sufficient.
    if data.size == mesh.world.size:
        if data.size > 1:
            data.all_reduce(vector)
            traffic.control += vector.numel()
        return
    if data.size > 1 and vector.numel() > common:
        data.all_reduce(vector[common:])
    mesh.world.all_reduce(vector[:common])
    traffic.control += vector.numel()


def clip_coefficient(norm: float, limit: float) -> float:
    """Return the factor that clips a gradient to norm `limit`, like torch's `clip_grad_norm_`; 1 if `limit` <= 0."""
    if limit <= 0:
        return 1.0
    coefficient = limit / (norm + 1e-6)
    return coefficient if coefficient < 1.0 or math.isnan(coefficient) else 1.0
