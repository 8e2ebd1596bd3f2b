"""Data-parallel groups: ranks over which units are sharded and their gradients reduced. Experts may have
smaller groups."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.comm.mesh import Mesh
from windlass.comm.rank_group import DataMesh, RankGroup
from windlass.comm.transport import Transport
from windlass.parallel.placement import PlacementKey


@dataclass(eq=False)
class DataParallelGroup:
    """Ranks over which certain units are sharded and their gradients reduced.

    Attributes:
        mesh: Groups of the data ranks. Gradients are reduced over `mesh.data`.
        group: Ranks over which optimizer states are sharded; the ranks of `mesh.data` if states are not sharded.
        transport: Transport over `group`.
        transport_reason: Reason for the choice of this transport.
        secondary_transport: Transport over the nearby ranks of hpZ; None without secondary shards.
    """

    mesh: DataMesh
    group: RankGroup
    transport: Transport
    transport_reason: str
    secondary_transport: Transport | None = None

    def extra_reduce_groups(self, mesh: Mesh, kind: PlacementKey, *, is_sharded: bool) -> list[RankGroup]:
        """Return further groups over which a reduced shard is summed.

        These are ranks that hold replicas of sharded states, ranks that compute only parts of a gradient, and pipeline
        stages that share the parameter. Groups of one rank are left out.

        Args:
            is_sharded: Optimizer states are sharded.
        """
        groups = [self.mesh.replicate] if is_sharded else []
        groups += [mesh.axes[axis].group for axis in sorted(kind.partial_axes)]
        if kind.shared_stages:
            groups.append(mesh.stages[kind.shared_stages].group)
        return [group for group in groups if group.size > 1]
