"""Data-parallel groups of a mesh, and the weight of each rank's shard in the gradient norm."""

from __future__ import annotations

import torch

from windlass.comm.choose_transport import choose_transport
from windlass.comm.mesh import Mesh
from windlass.parallel.placement import PlacementKey
from windlass.storage.slot import Tier
from windlass.zero.core.dp_group import DataParallelGroup
from windlass.zero.setup.zero_settings import Placements, ZeroSettings

REPLICA_AXES = ("tp",)
"""Axes along which ranks compute the same values, so that parameters not sharded along them are replicated."""


def norm_weight(mesh: Mesh, kind: PlacementKey) -> float:
    """Return the weight of this rank's shard in the sum of squares of the gradient norm.

    A parameter with copies outside its data-parallel group counts once in total.
    """
    copies = mesh.grid.size(*(axis for axis in REPLICA_AXES if axis not in kind.sharded_axes))
    return 1.0 / (copies * max(1, len(kind.shared_stages)))


def is_primary_replica(mesh: Mesh, kind: PlacementKey) -> bool:
    """Return True on the first of the tensor-parallel ranks and pipeline stages that hold a copy of the parameter."""
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
