"""Data-parallel groups: the ranks over which units are sharded and reduced. Experts have smaller groups than dense
units.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from windlass.comm.choose_transport import choose_transport
from windlass.comm.mesh import Mesh
from windlass.comm.rank_group import DataMesh, RankGroup
from windlass.comm.transport import Transport
from windlass.parallel.placement import PlacementKey
from windlass.storage.slot import Tier
from windlass.zero.core.zero_settings import Placements, ZeroSettings

REPLICA_AXES = ("tp",)
"""Axes along which ranks compute the same, so that parameters not sharded over them are replicated."""


@dataclass(eq=False)
class DataParallelGroup:
    """Ranks over which a set of units is sharded and reduced.

    Attributes:
        mesh: the ranks over which gradients are reduced.
        group: the ranks over which states are sharded.
        transport: transport of `group`.
        transport_reason: why this transport was chosen.
        secondary_transport: transport of the smaller group of hpZ; None without hpZ.
    """

    mesh: DataMesh
    group: RankGroup
    transport: Transport
    transport_reason: str
    secondary_transport: Transport | None = None

    def extra_reduce_groups(self, mesh: Mesh, kind: PlacementKey, *, cut: bool) -> list[RankGroup]:
        """Return further groups over which a reduced shard must be summed: replicas of sharded states, ranks that
        compute only
        part of a gradient, and pipeline stages that share the parameter.
        """
        groups = [self.mesh.replicate] if cut else []
        groups += [mesh.axes[axis].group for axis in sorted(kind.partial_axes)]
        if kind.shared_stages:
            groups.append(mesh.stages[kind.shared_stages].group)
        return [group for group in groups if group.size > 1]


def norm_weight(mesh: Mesh, kind: PlacementKey) -> float:
    """Return the weight of a rank's shard in the squared gradient norm, so that a parameter that is replicated
    outside its
    data-parallel group counts once.
    """
    copies = mesh.grid.size(*(axis for axis in REPLICA_AXES if axis not in kind.sharded_axes))
    return 1.0 / (copies * max(1, len(kind.shared_stages)))


def is_primary_replica(mesh: Mesh, kind: PlacementKey) -> bool:
    """Return True if this rank is the first of the ranks that hold the same parameter outside its data-parallel
    group.
    """
    beside = all(axis in kind.sharded_axes or mesh.axes[axis].index == 0 for axis in REPLICA_AXES)
    return beside and (not kind.shared_stages or mesh.pp.index == kind.shared_stages[0])


def build_dp_groups(
    mesh: Mesh, settings: ZeroSettings, homes: Placements, device: torch.device
) -> list[DataParallelGroup]:
    """Create a model's data-parallel groups, that of dense parameters first. Collective."""
    made: list[DataParallelGroup] = []
    for data in [mesh.dense] if mesh.experts is mesh.dense else [mesh.dense, mesh.experts]:
        group = data.shard if settings.policy.state else data.data
        transport, why = choose_transport(
            settings.transport, group, device, ways=settings.wire_options, timeout=settings.timeout
        )
        regather = None
        if data.secondary is not None and settings.policy.param and homes.param is Tier.DEVICE:
            regather, _ = choose_transport(
                transport.name, data.secondary, device, ways=settings.wire_options, timeout=settings.timeout
            )
        if made:
            transport.traffic = made[0].transport.traffic
        if regather is not None:
            regather.traffic = transport.traffic
        made.append(DataParallelGroup(data, group, transport, why, regather))
    return made
