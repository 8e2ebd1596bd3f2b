"""Data-parallel groups: ranks over which units are sharded and reduced. Experts have smaller ones than dense units."""

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
"""Axes along which ranks compute the same values, so that parameters not sharded along them are replicated."""


@dataclass(eq=False)
class DataParallelGroup:
    """Ranks over which certain units are sharded and reduced.

    Attributes:
        mesh: Ranks over which gradients are reduced.
        group: Ranks over which optimizer states are sharded, if they are.
        transport: Transport over `group`.
        transport_reason: Reason for the choice of this transport.
        secondary_transport: Transport over the nearby ranks of hpZ (secondary shards); None without hpZ.
    """

    mesh: DataMesh
    group: RankGroup
    transport: Transport
    transport_reason: str
    secondary_transport: Transport | None = None

    def extra_reduce_groups(self, mesh: Mesh, kind: PlacementKey, *, is_sharded: bool) -> list[RankGroup]:
        """Return further groups over which a reduced shard is summed.

        These are the other replicas of sharded states, ranks that compute only parts of a gradient, and pipeline stages
        that share the parameter.
        """
        groups = [self.mesh.replicate] if is_sharded else []
        groups += [mesh.axes[axis].group for axis in sorted(kind.partial_axes)]
        if kind.shared_stages:
            groups.append(mesh.stages[kind.shared_stages].group)
        return [group for group in groups if group.size > 1]


def norm_weight(mesh: Mesh, kind: PlacementKey) -> float:
    """Return the weight of the squares of this rank's shard in the norm.

    A parameter with copies outside its data ranks counts once in total.
    """
    copies = mesh.grid.size(*(axis for axis in REPLICA_AXES if axis not in kind.sharded_axes))
    return 1.0 / (copies * max(1, len(kind.shared_stages)))


def is_primary_replica(mesh: Mesh, kind: PlacementKey) -> bool:
    """Return True on the first of the ranks that hold a copy of the parameter and are not data ranks of each other."""
    is_first = all(axis in kind.sharded_axes or mesh.axes[axis].index == 0 for axis in REPLICA_AXES)
    return is_first and (not kind.shared_stages or mesh.pp.index == kind.shared_stages[0])


def build_dp_groups(
    mesh: Mesh, settings: ZeroSettings, tiers: Placements, device: torch.device
) -> list[DataParallelGroup]:
    """Return the data-parallel groups of a model, the dense one first. Collective."""
    groups: list[DataParallelGroup] = []
    for data in [mesh.dense] if mesh.experts is mesh.dense else [mesh.dense, mesh.experts]:
        group = data.shard if settings.policy.state else data.data
        transport, why = choose_transport(
            settings.transport, group, device, ways=settings.wire_options, timeout=settings.timeout
        )
        regather = None
        # An offloaded shard is not in device memory, so a secondary shard there would defeat the offload.
        if data.secondary is not None and settings.policy.param and tiers.param is Tier.DEVICE:
            regather, _ = choose_transport(
                transport.name, data.secondary, device, ways=settings.wire_options, timeout=settings.timeout
            )
        # One traffic count for the whole model.
        if groups:
            transport.traffic = groups[0].transport.traffic
        if regather is not None:
            regather.traffic = transport.traffic
        groups.append(DataParallelGroup(data, group, transport, why, regather))
    return groups
