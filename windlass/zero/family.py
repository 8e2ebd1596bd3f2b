"""Units that are cut and reduced over the same ranks: those of experts have fewer than all others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from windlass.comm.choose import choose_transport
from windlass.comm.groups import DataMesh, Group
from windlass.comm.mesh import Mesh
from windlass.comm.transport import Transport
from windlass.parallel.placement import Kind
from windlass.storage.slot import Home
from windlass.zero.settings import Homes, Settings

BESIDE = ("tp",)
"""Axes along which ranks compute the same, so that what they don't cut is there several times."""


@dataclass(eq=False)
class Family:
    """Units that are cut and reduced over the same ranks.

    Attributes:
        mesh: the ranks over which their gradients are reduced.
        group: those over which states are cut, where they are.
        transport: over it.
        why: this transport was chosen.
        regather: the nearer one of hpZ.
    """

    mesh: DataMesh
    group: Group
    transport: Transport
    why: str
    regather: Transport | None = None

    def sums(self, mesh: Mesh, kind: Kind, *, cut: bool) -> list[Group]:
        """Groups over which a reduced cut has to be added up besides: of other replicas of states that are cut, of
        ranks that see only parts of a gradient, of stages of a pipeline that hold the same parameter."""
        groups = [self.mesh.replicate] if cut else []
        groups += [mesh.axes[axis].group for axis in sorted(kind.parts)]
        if kind.stages:
            groups.append(mesh.stages[kind.stages].group)
        return [group for group in groups if group.size > 1]


def share(mesh: Mesh, kind: Kind) -> float:
    """What a rank adds of the squares of its cut to the norm of the whole: a parameter that other ranks have too, which
    are no data ranks of it, counts once."""
    copies = mesh.grid.size(*(axis for axis in BESIDE if axis not in kind.cut))
    return 1.0 / (copies * max(1, len(kind.stages)))


def speaks(mesh: Mesh, kind: Kind) -> bool:
    """Whether this rank is the first of those that have the same and are no data ranks of it."""
    beside = all(axis in kind.cut or mesh.axes[axis].index == 0 for axis in BESIDE)
    return beside and (not kind.stages or mesh.pp.index == kind.stages[0])


def families_of(mesh: Mesh, settings: Settings, homes: Homes, device: torch.device) -> list[Family]:
    """The families of a model, that of dense parameters first. Collective."""
    made: list[Family] = []
    for data in [mesh.dense] if mesh.experts is mesh.dense else [mesh.dense, mesh.experts]:
        group = data.shard if settings.policy.state else data.data
        transport, why = choose_transport(
            settings.transport, group, device, ways=settings.ways, timeout=settings.timeout
        )
        regather = None
        if data.regather is not None and settings.policy.param and homes.param is Home.DEVICE:
            regather, _ = choose_transport(
                transport.name, data.regather, device, ways=settings.ways, timeout=settings.timeout
            )
        if made:
            transport.traffic = made[0].transport.traffic
        if regather is not None:
            regather.traffic = transport.traffic
        made.append(Family(data, group, transport, why, regather))
    return made
