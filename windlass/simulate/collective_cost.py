"""Time and link loads of a collective, by algorithm.

[Note: loads of a collective] All groups of an axis run the same collective at the same time, so the load of a link is
the sum over the groups that use it. Loads are counted on the links of the first hosts ([Note: folded links]) and are
proportional to the bytes, so each pattern of ranks is analyzed once.

Over n ranks and B bytes (size of the full buffer; for an all-to-all, size of all messages of one rank):
- `ring`: each rank sends B (n - 1) / n to the next one, in n - 1 steps; an all-reduce does this twice (Patarasuk and
  Yuan 2009). Groups with several ranks on a host run one ring for each of these ranks, to use all network cards.
- `tree`: all-reduce over hosts in two complementary binary trees, half of B in each (Sanders et al. 2009), and a chain
  inside of each host.
- `hierarchical`: in sequence, a collective inside each host and one between ranks with the same local index.
- `pairwise`: each rank sends each other rank's part directly, as windlass does on gloo and in every all-to-all.
- `auto`: the fastest of `ring`, `tree` and `hierarchical` that apply, as NCCL chooses; `pairwise` for an all-to-all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from windlass.base.errors import ConfigError
from windlass.comm.mesh_shape import MeshShape
from windlass.simulate.cluster import AXIS_LINK, Cluster, DirectedLink

ALGORITHMS = ("auto", "ring", "tree", "hierarchical", "pairwise")

Loads = dict[str, float]  # bytes on the most loaded link of a kind


@dataclass(frozen=True)
class Phase:
    """Part of a collective whose transfers run at the same time.

    Attributes:
        latency: Seconds that do not depend on bytes.
        loads: Bytes on the most loaded link of each kind.
    """

    latency: float
    loads: Loads

    def seconds(self, cluster: Cluster) -> float:
        """Return the time if nothing else uses the links."""
        return self.latency + max((n / cluster.link_part(kind).usable for kind, n in self.loads.items()), default=0.0)

    def slowest_link(self, cluster: Cluster) -> str:
        """Return the kind of link that limits the transfers; empty if there are none."""
        return max(self.loads, key=lambda kind: self.loads[kind] / cluster.link_part(kind).usable, default="")

    def plus(self, other: Phase) -> Phase:
        """Return the sum of latencies and loads. The times add up too if both phases have the same slowest link."""
        kinds = dict.fromkeys((*self.loads, *other.loads))
        loads = {kind: self.loads.get(kind, 0.0) + other.loads.get(kind, 0.0) for kind in kinds}
        return Phase(self.latency + other.latency, loads)


@dataclass(frozen=True)
class CollectiveCost:
    """Cost of one collective.

    Attributes:
        algorithm: Name of the algorithm; `none` for a group of one rank.
        phases: Parts in the order in which they run.
    """

    algorithm: str
    phases: tuple[Phase, ...] = ()

    def seconds(self, cluster: Cluster) -> float:
        """Return the time if nothing else uses the links."""
        return sum(phase.seconds(cluster) for phase in self.phases)


@dataclass(frozen=True)
class RankPattern:
    """Groups of ranks along axes of a mesh.

    Attributes:
        axes: Axes along which ranks of a group differ.
        block: Number of neighbours in each of the smaller groups that a group is divided into; 0: not divided.
        stride: Number of smaller groups that a group is divided into, each with every `stride`-th rank; 1: not divided.
    """

    axes: tuple[str, ...]
    block: int = 0
    stride: int = 1


class CollectiveCosts:
    """Costs of collectives on a cluster, for the groups of a mesh."""

    def __init__(self, cluster: Cluster, grid: MeshShape) -> None:
        self.cluster, self.grid = cluster, grid
        self._unit_costs, self._messages = cache(self._analyze), cache(self._message)
        self._offsets = cache(lambda axes: grid.along(0, *axes))
        self._axis_costs: dict[str, CollectiveCosts] = {}

    def size(self, pattern: RankPattern) -> int:
        """Return the number of ranks of a group."""
        return len(self.group_of(0, pattern))

    def group_of(self, rank: int, pattern: RankPattern) -> list[int]:
        """Return the group of a rank, in ascending order."""
        places = self.grid.coordinates(rank)
        base = rank - self.grid.rank(**{axis: places[axis] for axis in pattern.axes})
        ranks = [base + offset for offset in self._offsets(pattern.axes)]
        at = ranks.index(rank)
        if pattern.block:
            start = at // pattern.block * pattern.block
            return ranks[start : start + pattern.block]
        return ranks[at % pattern.stride :: pattern.stride]

    def cost(self, pattern: RankPattern, operation: str, nbytes: float, algorithm: str = "auto") -> CollectiveCost:
        """Return the cost of a collective that all groups of a pattern run at once.

        Args:
            operation: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `broadcast`, or `pass_on` (each rank
                sends `nbytes` to the next one).
            nbytes: Bytes of the full buffer; for an all-to-all, of all parts of one rank, including the part that it
                keeps.

        Raises:
            ConfigError: the algorithm does not exist or does not apply to the operation.
        """
        if algorithm not in ALGORITHMS:
            raise ConfigError(f"algorithm {algorithm!r} does not exist; write one of {', '.join(ALGORITHMS)}")
        if self.size(pattern) == 1:
            return CollectiveCost("none")
        if len(pattern.axes) == 1 and pattern.axes[0] in self.cluster.host.axis_links:
            axis = pattern.axes[0]
            return _on_axis_link(self._along(axis).cost(pattern, operation, nbytes, algorithm), axis)
        choices = [algorithm] if algorithm != "auto" else _choices(operation, self._has_levels(pattern))
        found = [_scaled(self._unit_costs(pattern, operation, choice), nbytes) for choice in choices]
        return min(found, key=lambda one: one.seconds(self.cluster))

    def send(self, sender: int, receiver: int, nbytes: float) -> CollectiveCost:
        """Return the cost of one message, while all ranks of the sender's host and pipeline stage send one over the
        same distance.
        """
        if "pp" in self.cluster.host.axis_links:
            return _on_axis_link(self._along("pp").send(sender, receiver, nbytes), "pp")
        return _scaled(self._messages(sender, receiver), nbytes)

    def _along(self, axis: str) -> CollectiveCosts:
        """Return the costs on the links of an axis."""
        if axis not in self._axis_costs:
            self._axis_costs[axis] = CollectiveCosts(self.cluster.along(axis), self.grid)
        return self._axis_costs[axis]

    def _message(self, sender: int, receiver: int) -> CollectiveCost:
        # The sender's neighbours on its host, at the same pipeline stage, send at the same time.
        devices, distance = self.cluster.host.devices, receiver - sender
        first, loads, latency = sender // devices * devices, defaultdict[DirectedLink, float](float), 0.0
        for rank in range(first, min(first + devices, self.grid.world)):
            if self.grid.coordinates(rank)["pp"] != self.grid.coordinates(sender)["pp"]:
                continue
            if 0 <= rank + distance < self.grid.world:
                route = self.cluster.route(rank, rank + distance)
                latency = max(latency, self.cluster.latency(route))
                for link in route:
                    loads[link] += 1.0
        return CollectiveCost("message", (Phase(latency, _largest(loads)),))

    def _has_levels(self, pattern: RankPattern) -> bool:
        """Return True if undivided groups have the same number of ranks, at least 2, on each of several hosts."""
        hosts = _by_host(self.group_of(0, pattern), self.cluster)
        even = len({len(ranks) for ranks in hosts}) == 1 and len(hosts[0]) > 1
        return len(hosts) > 1 and even and not pattern.block and pattern.stride == 1

    def _analyze(self, pattern: RankPattern, operation: str, algorithm: str) -> CollectiveCost:
        """Return the cost for one byte. Latencies do not depend on the number of bytes."""
        n = self.size(pattern)
        share = (n - 1) / n
        if algorithm == "hierarchical":
            return CollectiveCost(algorithm, tuple(self._hierarchical(pattern, operation)))
        if algorithm == "tree":
            if operation not in ("all_reduce", "broadcast"):
                raise ConfigError(f"algorithm 'tree' does not apply to {operation}; write auto")
            return CollectiveCost(algorithm, (self._tree(pattern, both_ways=operation == "all_reduce"),))
        if algorithm == "pairwise":
            return CollectiveCost(algorithm, (_times(self._pairwise(pattern), 2 if operation == "all_reduce" else 1),))
        if operation == "pass_on":
            return CollectiveCost(algorithm, (self._ring(pattern, 1.0, steps=1, channels=False),))
        if operation == "all_to_all":
            raise ConfigError("algorithm 'ring' does not apply to all_to_all; write pairwise or auto")
        one = self._ring(pattern, share, steps=n - 1)
        if operation == "broadcast":
            return CollectiveCost(algorithm, (Phase(one.latency, {k: v / share for k, v in one.loads.items()}),))
        return CollectiveCost(algorithm, (_times(one, 2 if operation == "all_reduce" else 1),))

    def _sample(self, pattern: RankPattern) -> Iterator[list[int]]:
        """Yield the groups that have ranks on the first hosts, each once."""
        seen = set[int]()
        for rank in range(min(self.grid.world, self.cluster.sample_hosts * self.cluster.host.devices)):
            if rank not in seen:
                group = self.group_of(rank, pattern)
                seen.update(group)
                yield group

    def _ring(self, pattern: RankPattern, nbytes: float, *, steps: int, channels: bool = True) -> Phase:
        loads = defaultdict[DirectedLink, float](float)
        latency = 0.0
        for group in self._sample(pattern):
            orders = list(self._ring_orders(group)) if channels else [group]
            for number, order in enumerate(orders):
                total = 0.0
                for a, b in pairwise([*order, order[0]]):
                    if number and not self._is_sampled(a) and not self._is_sampled(b):
                        continue
                    route = self.cluster.route(a, b)
                    if not number:
                        total += self.cluster.latency(route)
                    for link in route:
                        loads[link] += nbytes / len(orders)
                latency = max(latency, total * steps / len(group))
        return Phase(latency, _largest(loads))

    def _is_sampled(self, rank: int) -> bool:
        return self.cluster.host_of(rank) < self.cluster.sample_hosts

    def _ring_orders(self, group: list[int]) -> Iterator[list[int]]:
        """Yield one order of the ranks for each ring. Each ring enters a host at a different rank."""
        hosts = _by_host(group, self.cluster)
        local = min(len(ranks) for ranks in hosts)
        for channel in range(local if len(hosts) > 1 else 1):
            yield [rank for ranks in hosts for rank in ranks[channel:] + ranks[:channel]]

    def _tree(self, pattern: RankPattern, *, both_ways: bool) -> Phase:
        loads, latency = defaultdict[DirectedLink, float](float), 0.0
        for group in self._sample(pattern):
            hosts = _by_host(group, self.cluster)
            channels = min(len(ranks) for ranks in hosts)
            local = sum(self.cluster.latency(self.cluster.route(a, b)) for a, b in pairwise(hosts[0]))
            hop = 0.0
            for channel in range(channels):
                for shift in (0, 1):  # two trees, each with half of the bytes
                    nbytes = 0.5 / channels
                    for at in range(1, len(hosts)):
                        child, parent = hosts[(at + shift) % len(hosts)], hosts[((at - 1) // 2 + shift) % len(hosts)]
                        a, b = child[channel], parent[channel]
                        route = self.cluster.route(a, b)
                        hop = max(hop, self.cluster.latency(route))
                        for link in route if both_ways else ():
                            loads[link] += nbytes
                        for link in self.cluster.route(b, a):
                            loads[link] += nbytes
                for ranks in hosts:
                    if not self._is_sampled(ranks[0]):
                        continue
                    for a, b in pairwise(ranks[channel:] + ranks[:channel]):
                        for link in [*self.cluster.route(a, b), *(self.cluster.route(b, a) if both_ways else [])]:
                            loads[link] += 1.0 / channels
            depth = max(1, (len(hosts) - 1).bit_length())
            latency = max(latency, (2 if both_ways else 1) * (depth * hop + local))
        return Phase(latency, _largest(loads))

    def _hierarchical(self, pattern: RankPattern, operation: str) -> Iterator[Phase]:
        group = self.group_of(0, pattern)
        hosts = _by_host(group, self.cluster)
        local, count = len(hosts[0]), len(hosts)
        if any(len(ranks) != local for ranks in hosts) or pattern.block or pattern.stride > 1:
            raise ConfigError(
                "algorithm 'hierarchical' needs the same number of ranks on each host, and a pattern without block and "
                "stride; write auto"
            )
        inside, across = RankPattern(pattern.axes, block=local), RankPattern(pattern.axes, stride=local)
        if operation == "all_to_all":
            yield _phase(self._pairwise(inside), 1.0)
            yield _phase(self._pairwise(across), 1.0)
            return
        near = self._ring(inside, (local - 1) / local, steps=local - 1) if local > 1 else None
        far = self._ring(across, (count - 1) / count / local, steps=count - 1, channels=False) if count > 1 else None
        order = {
            "all_gather": (far, near),
            "reduce_scatter": (near, far),
            "all_reduce": (near, far, far, near),
            "broadcast": (far, near),
        }
        yield from (phase for phase in order[operation] if phase is not None)

    def _pairwise(self, pattern: RankPattern) -> Phase:
        loads, latency = defaultdict[DirectedLink, float](float), 0.0
        for group in self._sample(pattern):
            for a in group:
                for b in group:
                    if a == b or not (self._is_sampled(a) or self._is_sampled(b)):
                        continue
                    route = self.cluster.route(a, b)
                    latency = max(latency, self.cluster.latency(route))
                    for link in route:
                        loads[link] += 1.0 / len(group)
        return Phase(latency, _largest(loads))


def _choices(operation: str, has_levels: bool) -> list[str]:
    if operation == "all_to_all":
        return ["pairwise"]
    if operation == "pass_on":
        return ["ring"]
    found = ["ring"]
    if operation in ("all_reduce", "broadcast"):
        found.append("tree")
    return [*found, "hierarchical"] if has_levels else found


def _by_host(group: list[int], cluster: Cluster) -> list[list[int]]:
    hosts: dict[int, list[int]] = {}
    for rank in group:
        hosts.setdefault(cluster.host_of(rank), []).append(rank)
    return list(hosts.values())


def _largest(loads: dict[DirectedLink, float]) -> Loads:
    found: Loads = {}
    for link, nbytes in loads.items():
        found[link.kind] = max(found.get(link.kind, 0.0), nbytes)
    return found


def _times(one: Phase, often: int) -> Phase:
    return Phase(often * one.latency, {kind: often * nbytes for kind, nbytes in one.loads.items()})


def _phase(one: Phase, factor: float) -> Phase:
    return Phase(one.latency, {kind: nbytes * factor for kind, nbytes in one.loads.items()})


def _on_axis_link(one: CollectiveCost, axis: str) -> CollectiveCost:
    names = {"device": AXIS_LINK + axis}
    phases = (Phase(at.latency, {names.get(kind, kind): n for kind, n in at.loads.items()}) for at in one.phases)
    return CollectiveCost(one.algorithm, tuple(phases))


def _scaled(one: CollectiveCost, nbytes: float) -> CollectiveCost:
    return CollectiveCost(one.algorithm, tuple(_phase(phase, nbytes) for phase in one.phases))
