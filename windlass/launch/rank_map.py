"""Mapping of a mesh to hosts: rank placement, axes that cross nodes, and traffic of each axis. Only arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from windlass.comm.mesh_shape import AXES, DATA_AXES, EXPERT_DATA_AXES, MeshShape
from windlass.launch.rank_placement import Host, RankPlacement, place_ranks
from windlass.parallel.comm_volumes import StepWorkload, compute_step_volumes, sum_bytes_by_axis
from windlass.parallel.model_shape import ModelShape

TRAFFIC_AXES = {
    "pp": ("pp",),
    "data": DATA_AXES,
    "experts": EXPERT_DATA_AXES,
    "ep": ("ep",),
    "sp": ("sp",),
    "tp": ("tp",),
}
"""Mesh axes along which each kind of traffic runs, by the name of the kind in `parallel.comm_volumes`."""


@dataclass(frozen=True)
class AxisTraffic:
    """Traffic along an axis: its ranks, the nodes it spans, and the most bytes that any rank receives in a step."""

    axis: str
    num_ranks: int
    num_nodes: int
    example_ranks: tuple[int, ...]
    nbytes: int
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class HostRankMap:
    """Placement of the ranks of a mesh shape on hosts, in the order of the hosts."""

    grid: MeshShape
    hosts: tuple[Host, ...]
    model: ModelShape
    workload: StepWorkload

    @cached_property
    def placements_of_node(self) -> list[list[RankPlacement]]:
        """Rank placements of each host."""
        return place_ranks(self.hosts)

    @property
    def parallel_axes(self) -> list[str]:
        """Axes with more than one rank, outermost first."""
        return [axis for axis in AXES if self.grid.size(axis) > 1]

    def num_nodes_spanned(self, *axes: str) -> int:
        """Return the largest number of nodes over which a group along these axes extends."""
        node = {place.rank: place.node_rank for places in self.placements_of_node for place in places}
        return max(len({node[rank] for rank in group}) for group in self.grid.groups(*axes))

    def axis_traffic(self) -> Iterator[AxisTraffic]:
        """Yield the traffic along each axis with more than one rank, outermost first."""
        stages = [compute_step_volumes(self.model, self.grid, self.workload, pipe) for pipe in range(self.grid.pp)]
        for name, axes in TRAFFIC_AXES.items():
            ranks = self.grid.size(*axes)
            if ranks == 1 or (name == "experts" and not self.model.experts):
                continue
            what = [volume.tensors for stage in stages for volume in stage if volume.axis == name]
            nbytes = max(sum_bytes_by_axis(stage).get(name, 0) for stage in stages)
            yield AxisTraffic(
                name,
                ranks,
                self.num_nodes_spanned(*axes),
                self.grid.groups(*axes)[0],
                nbytes,
                tuple(dict.fromkeys(what)),
            )

    def warnings(self) -> list[str]:
        """Describe the flaws of this layout that still allow a run."""
        smallest = min(len(host.slots) for host in self.hosts)
        found = []
        if self.grid.tp > 1 and self.num_nodes_spanned("tp") > 1:
            fits = max(n for n in range(1, min(smallest, self.grid.tp) + 1) if self.grid.tp % n == 0)
            problem = f"tp {self.grid.tp} crosses nodes, of which the smallest has {smallest} ranks"
            remedy = f"write tp {fits} and a larger pp" if fits < self.grid.tp else "give each node as many"
            found.append(f"{problem}: every layer waits for the network four times a micro-batch; {remedy}")
        if self.grid.pp > self.model.layers:
            found.append(f"pp {self.grid.pp} is more than the {self.model.layers} layers: some stages have none")
        if self.model.experts and self.grid.ep > self.model.experts:
            found.append(f"ep {self.grid.ep} is more than the {self.model.experts} experts: some ranks have none")
        return found


def format_rank_list(ranks: Sequence[int]) -> str:
    """Format ranks briefly: `0-3`, `0 8 16 24`, `0 4 ... 28`."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 6:
        return f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"
    return " ".join(str(rank) for rank in ranks)
