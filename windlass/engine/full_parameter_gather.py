"""Whole weights come to the first rank, one unit in memory at a time, from wherever their parts are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from windlass.comm.mesh import Mesh
from windlass.parallel.full_parameters import gather_full_with_grad
from windlass.zero.core.unit import Unit
from windlass.zero.sharded_model import ShardedModel


@dataclass(frozen=True)
class ParameterAnnouncement:
    """What a rank will send of one parameter.

    Attributes:
        turn: of its unit, among those of its stage.
        names: all that the model has for it.
        shape: of the whole.
    """

    unit_index: int
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Sender:
    rank: int
    stage: int
    announcements: list[ParameterAnnouncement]


class FullParameterGather:
    """Brings units whole to the first rank. Collective over all ranks, which make it with the same units of theirs.

    Attributes:
        entries: of all parameters that will come, on every rank.
    """

    def __init__(self, model: ShardedModel, units: Iterable[Unit], names: dict[int, list[str]]) -> None:
        self._model, self._units, self._mesh = model, list(units), model.mesh
        names = self._merge_names_of_stages(names)
        mine = [
            ParameterAnnouncement(turn, tuple(names[id(parameter)]), placement.global_shape, unit.dtype)
            for turn, unit in enumerate(self._units)
            if _is_sending_rank(unit, self._mesh)
            for parameter, placement in zip(unit.parameters, unit.placements, strict=True)
        ]
        said = self._mesh.gather_from_world((self._mesh.pp.index, len(self._units), mine))
        self._unit_counts = {stage: turns for stage, turns, _ in said}
        if len(said) == 1:  # of all ranks the same, and the first speaks
            self._senders = [_Sender(self._mesh.world.ranks[0], 0, mine if self._is_first_rank else [])]
        else:
            ranks = zip(self._mesh.world.ranks, said, strict=True)
            self._senders = [_Sender(rank, stage, told) for rank, (stage, _, told) in ranks if told]
        self.entries = [told for sender in self._senders for told in sender.announcements]

    def _merge_names_of_stages(self, names: dict[int, list[str]]) -> dict[int, list[str]]:
        """What several stages hold has all names that it has on any of them."""
        held = {unit.names[0]: unit.parameters[0] for unit in self._model.units if unit.kind.shared_stages}
        found = dict(names)
        for theirs in self._mesh.gather_from_world({name: names[id(parameter)] for name, parameter in held.items()}):
            for name, parameter in held.items():
                found[id(parameter)] = list(dict.fromkeys([*found[id(parameter)], *theirs.get(name, [])]))
        return found

    @property
    def _is_first_rank(self) -> bool:
        return self._mesh.world.index == 0

    def full_parameters(self) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
        """Yields, on the first rank, each parameter's names and the whole of it, gone or changed when the next is asked
        for; on others nothing, but they have to go through it. Collective."""
        for stage in sorted(self._unit_counts):
            for turn in range(self._unit_counts[stage]):
                if stage == self._mesh.pp.index:
                    yield from self._gather_own_unit(turn, stage)
                elif self._is_first_rank:
                    yield from self._receive_unit(turn, stage)

    def _gather_own_unit(self, unit_index: int, stage: int) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
        unit, me = self._units[unit_index], self._mesh.world.ranks[self._mesh.world.index]
        with self._model.runtime.unsharded([unit]):
            views = unit.views()
            with torch.no_grad():
                wholes = (
                    gather_full_with_grad(view.detach(), placement, self._mesh.axes)
                    for view, placement in zip(views, unit.placements, strict=True)
                )
                mine = [
                    told
                    for s in self._senders
                    if s.rank == me
                    for told in s.announcements
                    if told.unit_index == unit_index
                ]
                for told, whole in zip(mine, wholes, strict=True) if mine else ():
                    if self._is_first_rank:
                        yield told.names, whole
                    else:
                        self._send(whole)
                for _ in wholes:  # whoever says nothing takes part
                    pass
            if self._is_first_rank:
                yield from self._receive_unit(unit_index, stage)

    def _receive_unit(self, unit_index: int, stage: int) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
        first = self._mesh.world.ranks[0]
        for sender in self._senders:
            if sender.stage == stage and sender.rank != first:
                for told in sender.announcements:
                    if told.unit_index == unit_index:
                        whole = torch.empty(told.shape, dtype=told.dtype)
                        if whole.numel():
                            flat = whole.view(-1).view(torch.uint8)
                            dist.recv(flat, sender.rank, group=self._mesh.world.cpu_group)
                        yield told.names, whole

    def _send(self, full: torch.Tensor) -> None:
        if full.numel():
            flat = full.cpu().contiguous().view(-1).view(torch.uint8)
            dist.send(flat, self._mesh.world.ranks[0], group=self._mesh.world.cpu_group)


def _is_sending_rank(unit: Unit, mesh: Mesh) -> bool:
    """Whether this rank is the one that has a unit whole and says so: the first of those that have, or come to have,
    the same."""
    apart = unit.kind.is_expert and unit.placements[0].is_full  # other experts than along ep
    data = unit.dp_group.mesh.data if apart else mesh.dense.data
    first_stage = unit.kind.shared_stages[0] if unit.kind.shared_stages else mesh.pp.index
    return data.index == 0 and mesh.tp.index == 0 and mesh.pp.index == first_stage
