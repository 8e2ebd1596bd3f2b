"""Gathering of full parameters on rank 0, with one unit in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from windlass.comm.mesh import Mesh
from windlass.parallel.full_parameters import gather_full_with_grad
from windlass.zero.core.unit import Unit
from windlass.zero.sharded_model import ShardedModel


@dataclass(frozen=True)
class ParameterAnnouncement:
    """Description of one parameter whose full values are on rank 0, or will be sent to rank 0.

    Attributes:
        unit_index: index of the parameter's unit among the units that its pipeline stage gathers.
        names: all names of the parameter in the model.
        shape: shape of the full parameter.
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
    """Gathering of the full parameters of units on rank 0. Collective over all ranks, each with its own units.

    If a script gave a parameter other memory (`p.data = ...`), the values are read from there, and the parameter keeps
    that memory.

    Attributes:
        entries: announcements of all parameters, on rank 0; other ranks may have none.
    """

    def __init__(self, model: ShardedModel, units: Iterable[Unit], names: dict[int, list[str]]) -> None:
        self._model, self._units, self._mesh = model, list(units), model.mesh
        for unit in self._units:
            unit.current_views()  # a cast or resized parameter must raise here, not between the transfers
        names = self._merge_names_of_stages(names)
        local = [
            ParameterAnnouncement(index, tuple(names[id(parameter)]), placement.global_shape, unit.dtype)
            for index, unit in enumerate(self._units)
            if _is_sending_rank(unit, self._mesh)
            for parameter, placement in zip(unit.parameters, unit.placements, strict=True)
        ]
        gathered = self._mesh.gather_from_world((self._mesh.pp.index, len(self._units), local))
        self._unit_counts = {stage: num_units for stage, num_units, _ in gathered}
        if len(gathered) == 1:  # every rank gathers the full units, so only rank 0 announces parameters
            self._senders = [_Sender(self._mesh.world.ranks[0], 0, local if self._is_first_rank else [])]
        else:
            ranks = zip(self._mesh.world.ranks, gathered, strict=True)
            self._senders = [
                _Sender(rank, stage, announcements) for rank, (stage, _, announcements) in ranks if announcements
            ]
        self.entries = [announcements for sender in self._senders for announcements in sender.announcements]

    def _merge_names_of_stages(self, names: dict[int, list[str]]) -> dict[int, list[str]]:
        """Merge, for each parameter that several stages share, the names that it has on these stages."""
        held = {unit.names[0]: unit.parameters[0] for unit in self._model.units if unit.kind.shared_stages}
        values = dict(names)
        for theirs in self._mesh.gather_from_world({name: names[id(parameter)] for name, parameter in held.items()}):
            for name, parameter in held.items():
                values[id(parameter)] = list(dict.fromkeys([*values[id(parameter)], *theirs.get(name, [])]))
        return values

    @property
    def _is_first_rank(self) -> bool:
        return self._mesh.world.index == 0

    def full_parameters(self) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
        """Yield each parameter's names and full values on rank 0; a yielded tensor is valid until the next one.

        Collective: other ranks must exhaust the iterator too, which yields nothing there.
        """
        for stage in sorted(self._unit_counts):
            for index in range(self._unit_counts[stage]):
                if stage == self._mesh.pp.index:
                    yield from self._gather_own_unit(index, stage)
                elif self._is_first_rank:
                    yield from self._receive_unit(index, stage)

    def _gather_own_unit(self, unit_index: int, stage: int) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
        unit, me = self._units[unit_index], self._mesh.world.ranks[self._mesh.world.index]
        with self._model.runtime.exact_values(unit) as values:
            views = [value.contiguous() for value in values]
            with torch.no_grad():
                full_tensors = (
                    gather_full_with_grad(view.detach(), placement, self._mesh.axes)
                    for view, placement in zip(views, unit.placements, strict=True)
                )
                local = [
                    announcement
                    for s in self._senders
                    if s.rank == me
                    for announcement in s.announcements
                    if announcement.unit_index == unit_index
                ]
                for announcement, full in zip(local, full_tensors, strict=True) if local else ():
                    if self._is_first_rank:
                        yield announcement.names, full
                    else:
                        self._send(full)
                for _ in full_tensors:  # ranks that announced nothing still join the collectives
                    pass
            if self._is_first_rank:
                yield from self._receive_unit(unit_index, stage)

    def _receive_unit(self, unit_index: int, stage: int) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
        world = self._mesh.world
        first = world.ranks[0]
        for sender in self._senders:
            if sender.stage == stage and sender.rank != first:
                for announcement in sender.announcements:
                    if announcement.unit_index == unit_index:
                        full = torch.empty(announcement.shape, dtype=announcement.dtype)
                        if full.numel():
                            flat = full.view(-1).view(torch.uint8)
                            world.receive(flat, world.ranks.index(sender.rank))
                        yield announcement.names, full

    def _send(self, full: torch.Tensor) -> None:
        if full.numel():
            flat = full.cpu().contiguous().view(-1).view(torch.uint8)
            self._mesh.world.send(flat, 0)


def _is_sending_rank(unit: Unit, mesh: Mesh) -> bool:
    """Return True if this rank sends the unit: it is the first rank that holds, or all-gathers, the full unit."""
    # True for experts that differ from those of the other ranks along ep.
    apart = unit.kind.is_expert and unit.placements[0].is_full
    data = unit.dp_group.mesh.data if apart else mesh.dense.data
    first_stage = unit.kind.shared_stages[0] if unit.kind.shared_stages else mesh.pp.index
    return data.index == 0 and mesh.tp.index == 0 and mesh.pp.index == first_stage
