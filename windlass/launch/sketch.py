"""A mesh laid over hosts: which rank sits where, which axes leave a node, and what each sends. Arithmetic alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from windlass.comm.grid import AXES, DATA, EXPERT_DATA, Grid
from windlass.launch.place import Host, Place, places_of
from windlass.parallel.model_shape import ModelShape
from windlass.parallel.volumes import Work, by_axis, volumes

TALKS = {
    "pp": ("pp",),
    "data": DATA,
    "experts": EXPERT_DATA,
    "ep": ("ep",),
    "sp": ("sp",),
    "tp": ("tp",),
}
"""Over which axes each kind of traffic goes, by its name in `parallel.volumes`."""


@dataclass(frozen=True)
class Talk:
    """What goes along an axis: over how many ranks and nodes, and the most bytes that any rank receives in a step."""

    axis: str
    ranks: int
    nodes: int
    example: tuple[int, ...]
    nbytes: int
    what: tuple[str, ...]


@dataclass(frozen=True)
class Sketch:
    """Ranks of a grid on hosts, in the hosts' order."""

    grid: Grid
    hosts: tuple[Host, ...]
    model: ModelShape
    work: Work

    @cached_property
    def nodes(self) -> list[list[Place]]:
        """The places of each host."""
        return places_of(self.hosts)

    @property
    def shown_axes(self) -> list[str]:
        """Axes of several ranks, outermost first."""
        return [axis for axis in AXES if self.grid.size(axis) > 1]

    def spans(self, *axes: str) -> int:
        """Nodes over which a group along these axes lies, at most."""
        node = {place.rank: place.node for places in self.nodes for place in places}
        return max(len({node[rank] for rank in group}) for group in self.grid.groups(*axes))

    def talks(self) -> Iterator[Talk]:
        """What goes along each axis of several ranks, the outermost first."""
        stages = [volumes(self.model, self.grid, self.work, pipe) for pipe in range(self.grid.pp)]
        for name, axes in TALKS.items():
            ranks = self.grid.size(*axes)
            if ranks == 1 or (name == "experts" and not self.model.experts):
                continue
            what = [volume.what for stage in stages for volume in stage if volume.axis == name]
            nbytes = max(by_axis(stage).get(name, 0) for stage in stages)
            yield Talk(name, ranks, self.spans(*axes), self.grid.groups(*axes)[0], nbytes, tuple(dict.fromkeys(what)))

    def warnings(self) -> list[str]:
        """What is wrong with this layout, though it can be run."""
        smallest = min(len(host.slots) for host in self.hosts)
        found = []
        if self.grid.tp > 1 and self.spans("tp") > 1:
            fits = max(n for n in range(1, min(smallest, self.grid.tp) + 1) if self.grid.tp % n == 0)
            said = f"tp {self.grid.tp} crosses nodes, of which the smallest has {smallest} ranks"
            remedy = f"write tp {fits} and give the rest to pp" if fits < self.grid.tp else "let each node have as many"
            found.append(f"{said}: every layer waits for the network four times a micro-batch; {remedy}")
        if self.grid.pp > self.model.layers:
            found.append(f"pp {self.grid.pp} is more than the {self.model.layers} layers: stages without one")
        if self.model.experts and self.grid.ep > self.model.experts:
            found.append(f"ep {self.grid.ep} is more than the {self.model.experts} experts: ranks without one")
        return found


def ranges(ranks: Sequence[int]) -> str:
    """Ranks in few words: `0-3`, `0 8 16 24`, `0 4 ... 28`."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 6:
        return f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"
    return " ".join(str(rank) for rank in ranks)
