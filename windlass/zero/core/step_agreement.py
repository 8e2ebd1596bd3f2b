"""Agreement of all ranks before a step: gradient norm, sums over replicas, first non-finite gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from windlass.base.errors import ModelError
from windlass.base.log import logger
from windlass.base.text import plural
from windlass.comm.mesh import Mesh
from windlass.comm.traffic import Traffic
from windlass.comm.transport import local_shard
from windlass.zero.core.gradient_norm import NormVector, StepStatus, reduce_step_status
from windlass.zero.core.gradient_reducer import GradientReducer
from windlass.zero.core.gradient_slot import GradientSlot
from windlass.zero.core.sharding_policy import ShardingPolicy
from windlass.zero.core.unit import Unit

T = TypeVar("T")


class StepAgreement:
    """Agreement of all ranks before a step, in one exchange of the step status.

    A second exchange follows if some ranks still have unreduced gradients, or if gradients are summed over
    replicas of a parameter.
    The constructor is collective over all ranks.

    Args:
        gradients: Gradient reducer of this rank.
        units: All units of the model, trainable or not.
        policy: Sharding policy of the model.
        mesh: Mesh of all ranks.
        traffic: Counter of the exchanged elements.
        device: Device of the collectives.
        has_local_failure: Returns 1 if a disk transfer or an update of this rank has failed, else 0.
    """

    def __init__(
        self,
        gradients: GradientReducer,
        units: list[Unit],
        policy: ShardingPolicy,
        mesh: Mesh,
        traffic: Traffic,
        device: torch.device,
        has_local_failure: Callable[[], float],
    ) -> None:
        self._gradients, self._policy, self._mesh = gradients, policy, mesh
        self._traffic, self._device, self._has_local_failure = traffic, device, has_local_failure
        self._norm_vector = NormVector(mesh, device)
        # Ask all ranks, so that either all of them repeat the exchange or none does.
        self._has_replicas = any(mesh.gather_from_world(any(unit.extra_reduce_groups for unit in units)))
        self._replicas_summed = False  # True once this step's gradients are summed over replicas
        self._warned_uneven = False

    def agree(self, flags: list[float]) -> StepStatus:
        """Reduce the remaining gradients, sum them over replicas of parameters, and return the exchanged status.

        Collective over all ranks.

        Args:
            flags: Numbers to sum over ranks in the same exchange. `StepStatus.flags` has their sums, then the number of
                ranks for which `has_local_failure` returned 1.
        """
        # Finish the reductions in flight: the norm needs the summed gradients.
        self._gradients.finish()
        self._replicas_summed = False
        status = self._reduce_status(flags)
        again = self._has_replicas or status.flags.pop() > 0  # the last flag: some rank has unreduced gradients
        rest = status.unreduced
        used = [any(of_unit) for of_unit in status.used]
        if self._has_replicas:  # if only other replicas used a parameter, reduce zeros here
            rest = [
                left or (had and bool(slot.unit.extra_reduce_groups) and not slot.has_reduced)
                for slot, left, had in zip(self._gradients.slots, rest, used, strict=True)
            ]
        if any(rest):
            self._gradients.reduce_units(rest)
        if self._has_replicas:
            for slot, had in zip(self._gradients.slots, used, strict=True):
                if had and slot.unit.extra_reduce_groups and not slot.unit.unstepped:
                    self._sum_in_place(slot)
            self._replicas_summed = True
        # The status above was computed before these gradients were reduced or summed.
        if again:
            status = self._reduce_status(flags)
            status.flags.pop()
        if status.uneven and not self._warned_uneven:
            self._warned_uneven = True
            self._warn_uneven()
        return status

    def reduce_remaining(self) -> None:
        """Reduce the gradients that ranks accumulated locally, before the step. Collective over all ranks."""
        self._gradients.finish()
        rest = self._reduce_status([]).unreduced
        if any(rest):
            self._gradients.reduce_units(rest)

    def refuse_diverged(self) -> None:
        """Raise an error for `StepStatus.diverged`. Collective over the data ranks, whose status is equal.

        Raises:
            ModelError: always. The message names the cause: the script dropped gradients on some ranks only, or a step
                raised on some ranks only.
        """
        ranks, drops = self._mesh.dense.data.ranks, self._all_gather_from_data_ranks(self._gradients.dropped_names)
        if not any(drops):
            raise ModelError(
                "ranks have different gradients in this step, as after a step() that raised on some ranks only and "
                "dropped the gradients there: raise or catch such an error on all ranks. This step was skipped and all "
                "its gradients are dropped"
            )
        dropped_text = "; ".join(
            f"rank {rank} dropped {f'{len(local)} gradients, {local[0]!r} first' if local else 'none'}"
            for rank, local in zip(ranks, drops, strict=True)
        )
        raise ModelError(
            f"ranks dropped reduced gradients differently: {dropped_text}. Each rank has a shard of every gradient, so "
            "all ranks must call zero_grad() or set parameter.grad = None after the same backwards. This step was "
            "skipped and all its gradients are dropped"
        )

    def first_name(self, mine: str) -> str:
        """Return the first nonempty name in rank order; empty if no rank has one. Collective over all ranks."""
        return next((name for name in self._mesh.world.all_gather_object(mine) if name), "")

    def _warn_uneven(self) -> None:
        ranks, made = self._mesh.dense.data.ranks, self._all_gather_from_data_ranks(self._gradients.backward_count)
        if self._mesh.dense.data.index == 0:
            counts = ", ".join(f"rank {rank}: {count}" for rank, count in zip(ranks, made, strict=True))
            logger.warning(
                "ranks ran different numbers of backwards in this step (%s): the gradient is the mean over ranks of "
                "each rank's sum, as with DistributedDataParallel's no_sync around all backwards but the last. If "
                "that is not intended, call backward equally often on every rank. This warning is logged once",
                counts,
            )

    def _all_gather_from_data_ranks(self, mine: T) -> list[T]:
        """All-gather an object from the data ranks. Collective over them."""
        return self._mesh.dense.data.all_gather_object(mine)

    def forget(self) -> None:
        """Clear the flag that replicas were summed, because the gradients of the last agreement were dropped."""
        self._replicas_summed = False

    def local_part(self, unit: Unit, reduced: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a unit's reduced gradient, as a view `[layout.padded / size of the group]`.

        Args:
            reduced: `[state_stop - state_start]`: the shard if states are sharded, else the full gradient.
        """
        group = unit.dp_group.group
        return reduced if self._policy.state else local_shard(reduced, group.index, group.size)

    def sum_replicas(self, unit: Unit, part: torch.Tensor) -> torch.Tensor:
        """Sum `part` in place over the unit's `extra_reduce_groups`, unless this step's agreement did so already.

        Collective over these groups. Return `part`.

        Args:
            part: `local_part` of the unit's gradient, or the full gradient while gradients stay local.
        """
        # The slot of an unstepped unit never holds a sum over replicas, because later gradients are added to it.
        if unit.unstepped or not self._replicas_summed:
            for group in unit.extra_reduce_groups:
                group.all_reduce(part)
        return part

    def first_nonfinite(self) -> str:
        """Return the name of the first parameter in model order that has a non-finite reduced gradient.

        Return an empty string if all gradients are finite, and only the sum of their squares overflows. Collective over
        all ranks.
        """
        mine: list[tuple[int, int, int, str]] = []
        stage = self._mesh.pp.index
        for slot in self._gradients.slots:
            if slot.has_reduced and not slot.unit.unstepped:
                gradient = slot.read()
                local = self._gradients.keeps_local_gradients
                span = (0, gradient.numel()) if local else (slot.unit.state_start, slot.unit.state_stop)
                for piece in slot.unit.layout.pieces(*span):
                    part = gradient.narrow(0, piece.offset, piece.numel)
                    if piece.index not in slot.unit.outside and not bool(torch.isfinite(part).all()):
                        mine.append((stage, slot.unit.index, piece.index, slot.unit.names[piece.index]))
        of_ranks = self._mesh.world.all_gather_object(mine)
        return min((bad for bads in of_ranks for bad in bads), default=(0, 0, 0, ""))[-1]

    def refuse_unused(self, used: list[list[bool]]) -> None:
        """Raise if a parameter had no gradient. Collective over all ranks if the mesh has a model-parallel axis.

        Args:
            used: `StepStatus.used`.

        Raises:
            ModelError: a parameter had no gradient on any rank.
        """
        unused = [
            name
            for slot, flags in zip(self._gradients.slots, used, strict=True)
            for name, parameter, had in zip(slot.unit.names, slot.unit.parameters, flags, strict=True)
            if not had and parameter.requires_grad
        ]
        if not self._mesh.only_data:
            unused_of_ranks = self._mesh.world.all_gather_object(unused)
            unused = list(dict.fromkeys(name for names in unused_of_ranks for name in names))
        if unused:
            raise ModelError(
                f"{plural(len(unused), 'parameter')} had no gradient on any rank in this step, {unused[0]!r} first; "
                "freeze them, use them in the loss, or set zero_optimization.ignore_unused_parameters to true"
            )

    def _reduce_status(self, flags: list[float]) -> StepStatus:
        more = [*flags, self._has_local_failure(), float(any(self._gradients.unreduced()))]
        status = reduce_step_status(
            self._gradients, self._policy, self._mesh, self._norm_vector, self._traffic, flags=more
        )
        self._merge_stage_usage(status)
        return status

    def _merge_stage_usage(self, status: StepStatus) -> None:
        """Mark each parameter shared by several pipeline stages as used if any of these stages used it.

        Collective over these stages.
        """
        for stages, axis in self._mesh.stages.items():
            numbers = [
                number for number, slot in enumerate(self._gradients.slots) if slot.unit.kind.shared_stages == stages
            ]
            if numbers:
                flags = torch.tensor([flag for number in numbers for flag in status.used[number]], dtype=torch.float32)
                merged_flags = iter(axis.all_reduce(flags.to(self._device), dist.ReduceOp.MAX).tolist())
                for number in numbers:
                    status.used[number][:] = [next(merged_flags) > 0 for _ in status.used[number]]

    def _sum_in_place(self, slot: GradientSlot) -> None:
        values, traffic = slot.read(), slot.unit.transport.traffic
        local = self._gradients.keeps_local_gradients  # True: each data rank has a full gradient
        part = self.sum_replicas(slot.unit, values if local else self.local_part(slot.unit, values))
        slot.write(values)
        for group in slot.unit.extra_reduce_groups:
            elements = 2 * slot.unit.numel // slot.unit.dp_group.group.size
            traffic.add("replicate", elements, 2 * part.nbytes * (group.size - 1) // group.size)
