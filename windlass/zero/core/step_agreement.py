"""What all ranks agree on before a step, and what they then know of the gradient: its copies, its first bad element."""

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
    """Reached once a step, in one small reduction; in two where some ranks reduced what others did not, or replicas of
    a parameter are to be added up. Collective over all ranks when it is made.

    Args:
        gradients: of this rank.
        units: of its model, those too that are not trained yet.
        policy: over which ranks they are cut.
        mesh: all ranks.
        traffic: what counts the bytes of it.
        device: where collectives take what is said.
        bad: whether a disk of this rank failed by now, as a number.
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
        self._has_replicas = any(
            mesh.gather_from_world(any(unit.extra_reduce_groups for unit in units))
        )  # on any rank: all agree twice then
        self._replicas_summed = False  # gradients are the sum over replicas already
        self._warned_uneven = False

    def agree(self, flags: list[float]) -> StepStatus:
        """Reduce what is left, add up replicas, and agree. Collective over all ranks.

        Args:
            flags: numbers to add up over ranks on the same trip; in the verdict that of bad disks follows them.
        """
        self._gradients.finish()
        self._replicas_summed = False
        verdict = self._reduce_status(flags)
        again = self._has_replicas or verdict.flags.pop() > 0
        rest = verdict.unreduced
        used = [any(of_unit) for of_unit in verdict.used]
        if self._has_replicas:  # another replica may have used what none of these ranks did
            rest = [
                left or (had and bool(slot.unit.extra_reduce_groups) and not slot.has_reduced)
                for slot, left, had in zip(self._gradients.slots, rest, used, strict=True)
            ]
        if any(rest):
            self._gradients.reduce_units(rest)
        if self._has_replicas:
            for slot, had in zip(self._gradients.slots, used, strict=True):
                if had and slot.unit.extra_reduce_groups:
                    self._sum_in_place(slot)
            self._replicas_summed = True
        if again:
            verdict = self._reduce_status(flags)
            verdict.flags.pop()
        if verdict.uneven and not self._warned_uneven:
            self._warned_uneven = True
            self._warn_uneven()
        return verdict

    def refuse_diverged(self) -> None:
        """Collective over the data ranks, where all know that they diverged.

        Raises:
            ModelError: ranks dropped gradients that others kept.
        """
        ranks, drops = self._mesh.dense.data.ranks, self._all_gather_from_data_ranks(self._gradients.dropped_names)
        said = "; ".join(
            f"rank {rank} dropped {f'{len(mine)} gradients, {mine[0]!r} first' if mine else 'none'}"
            for rank, mine in zip(ranks, drops, strict=True)
        )
        raise ModelError(
            f"ranks dropped gradients that were reduced already, and not the same at the same place: {said}. Each rank "
            "has a shard of every gradient, so zero_grad() or parameter.grad = None has to be called by all ranks, "
            "after the same backwards. This step was not made and all its gradients are dropped"
        )

    def first_name(self, mine: str) -> str:
        """The name that the first rank has that has one. Collective over all ranks."""
        found = [mine] * self._mesh.world.size
        if len(found) > 1:
            dist.all_gather_object(found, mine, group=self._mesh.world.process_group)
        return next((name for name in found if name), "")

    def _warn_uneven(self) -> None:
        ranks, made = self._mesh.dense.data.ranks, self._all_gather_from_data_ranks(self._gradients.backward_count)
        if self._mesh.dense.data.index == 0:
            counts = ", ".join(f"rank {rank}: {count}" for rank, count in zip(ranks, made, strict=True))
            logger.warning(
                "ranks made different numbers of backwards in this step (%s): the gradient is the mean over ranks of "
                "each rank's sum, as with DistributedDataParallel's no_sync around all backwards but the last. This is "
                "not said again",
                counts,
            )

    def _all_gather_from_data_ranks(self, mine: T) -> list[T]:
        """What each data rank has. Collective over them."""
        data = self._mesh.dense.data
        found = [mine] * data.size
        if data.size > 1:
            dist.all_gather_object(found, mine, group=data.process_group)
        return found

    def forget(self) -> None:
        """The gradients that were agreed on are gone."""
        self._replicas_summed = False

    def local_part(self, unit: Unit, reduced: torch.Tensor) -> torch.Tensor:
        """What this rank's reductions bring of a unit's reduced gradient `[state_stop - state_start]`: a view."""
        group = unit.dp_group.group
        return reduced if self._policy.state else local_shard(reduced, group.index, group.size)

    def sum_replicas(self, unit: Unit, part: torch.Tensor) -> torch.Tensor:
        """Add to `own_part` of a unit, in place, those of ranks that have the same and reduced it among others, unless
        the step under way did. Collective over them."""
        if not self._replicas_summed:
            for group in unit.extra_reduce_groups:
                dist.all_reduce(part, group=group.process_group)
        return part

    def first_nonfinite(self) -> str:
        """The first parameter in model order whose reduced gradient is not finite; empty if all are, and only the sum
        of their squares is not. Collective over all ranks."""
        mine: list[tuple[int, int, int, str]] = []
        stage = self._mesh.pp.index
        for slot in self._gradients.slots:
            if slot.has_reduced:
                gradient = slot.read()
                local = self._gradients.keeps_local_gradients
                span = (0, gradient.numel()) if local else (slot.unit.state_start, slot.unit.state_stop)
                for piece in slot.unit.layout.pieces(*span):
                    part = gradient.narrow(0, piece.offset, piece.numel)
                    if not bool(torch.isfinite(part).all()):
                        mine.append((stage, slot.unit.index, piece.index, slot.unit.names[piece.index]))
        found: list[list[tuple[int, int, int, str]]] = [mine] * self._mesh.world.size
        if len(found) > 1:
            dist.all_gather_object(found, mine, group=self._mesh.world.process_group)
        return min((bad for bads in found for bad in bads), default=(0, 0, 0, ""))[-1]

    def refuse_unused(self, used: list[list[bool]]) -> None:
        """Collective where not all ranks are data ranks of the same.

        Args:
            used: as `Verdict.used`.

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
            told: list[list[str]] = [[]] * self._mesh.world.size
            dist.all_gather_object(told, unused, group=self._mesh.world.process_group)
            unused = list(dict.fromkeys(name for names in told for name in names))
        if unused:
            raise ModelError(
                f"{plural(len(unused), 'parameter')} had no gradient on any rank in this step, {unused[0]!r} first; "
                "freeze them, use them in the loss, or set zero_optimization.ignore_unused_parameters to true"
            )

    def _reduce_status(self, flags: list[float]) -> StepStatus:
        more = [*flags, self._has_local_failure(), float(any(self._gradients.unreduced()))]
        verdict = reduce_step_status(
            self._gradients, self._policy, self._mesh, self._norm_vector, self._traffic, flags=more
        )
        self._merge_stage_usage(verdict)
        return verdict

    def _merge_stage_usage(self, verdict: StepStatus) -> None:
        """What several stages of a pipeline hold is used where any of them uses it. Collective over those stages."""
        for stages, axis in self._mesh.stages.items():
            numbers = [
                number for number, slot in enumerate(self._gradients.slots) if slot.unit.kind.shared_stages == stages
            ]
            if numbers:
                flags = torch.tensor([flag for number in numbers for flag in verdict.used[number]], dtype=torch.float32)
                heard = iter(axis.all_reduce(flags.to(self._device), dist.ReduceOp.MAX).tolist())
                for number in numbers:
                    verdict.used[number][:] = [next(heard) > 0 for _ in verdict.used[number]]

    def _sum_in_place(self, slot: GradientSlot) -> None:
        values, traffic = slot.read(), slot.unit.transport.traffic
        part = self.sum_replicas(slot.unit, self.local_part(slot.unit, values))
        slot.write(values)
        for group in slot.unit.extra_reduce_groups:
            elements = 2 * slot.unit.numel // slot.unit.dp_group.group.size
            traffic.add("replicate", elements, 2 * part.nbytes * (group.size - 1) // group.size)
