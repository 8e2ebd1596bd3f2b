"""Data-parallel groups: ranks over which units are sharded and reduced. Experts have smaller ones than dense units."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.comm.mesh import Mesh
from windlass.comm.rank_group import DataMesh, RankGroup
from windlass.comm.transport import Transport
from windlass.parallel.placement import PlacementKey


@dataclass(eq=False)
class DataParallelGroup:
    """Ranks over which certain units are sharded and reduced.

    Attributes:
        mesh: Ranks over which gradients are reduced.
        group: Ranks over which optimizer states are sharded; the ranks of `mesh.data` if states are not sharded.
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
