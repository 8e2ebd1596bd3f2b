"""Clusters: devices, hosts, links and the routes between devices.

[Note: folded links] Links that carry equal loads by symmetry are one kind. A route is a list of directed links; the
loads of a collective are counted on every link that ranks of the first hosts use, and the most loaded link stands for
all links of its kind. The uplinks of a switch are one link whose rate is their sum, as with adaptive routing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import networkx as nx

from windlass.base.errors import ConfigError
from windlass.simulate.hardware_parts import DevicePart, HostPart, LinkPart

AXIS_LINK = "device along "
"""Prefix of `DirectedLink.kind` for a device's link along one axis (`HostPart.axis_links`)."""
TOPOLOGIES = ("switch", "fat-tree", "rail", "ring", "torus", "links")


@dataclass(frozen=True)
class DirectedLink:
    """One direction of a link.

    Attributes:
        kind: `device`, `device along AXIS`, `nic`, `leaf`, or the name of an explicit link. Links of one kind have one
            rate.
        source, target: Nodes, such as `device 3`, `host 0` or a switch.
    """

    kind: str
    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.kind} {self.source} > {self.target}"


@dataclass(frozen=True)
class ExplicitLink:
    """Link of a cluster file, between hosts or switches, in both directions."""

    source: str
    target: str
    part: LinkPart


@dataclass(frozen=True)
class Network:
    """Network between hosts.

    Attributes:
        topology: `switch` (only network cards limit rates), `fat-tree` (leaf switches under a spine), `rail` (cards
            with the same number on all hosts share leaf switches), `ring` or `torus` of hosts, or `links` (explicit).
        hosts_per_leaf: Hosts below one leaf switch (or rail).
        oversubscription: Rate of a leaf's ports to hosts over the rate of its uplinks.
        shape: Sides of the torus, in hosts.
        links: Explicit links.
        switch_latency: Seconds that each switch adds.
    """

    topology: str = "switch"
    hosts_per_leaf: int = 32
    oversubscription: float = 1.0
    shape: tuple[int, ...] = ()
    links: tuple[ExplicitLink, ...] = ()
    switch_latency: float = 5e-7


@dataclass(frozen=True)
class Cluster:
    """Cluster of equal hosts.

    Attributes:
        device_mtbf: Mean seconds between failures of one device with its share of host and network; 0: unknown.
        overlaps: Collectives run during computation. False for the CPU cluster in `CLUSTERS`, whose collectives use the
            cores that compute.
        name: Name for messages.

    Raises:
        ConfigError: the topology does not exist, or the sides of a torus do not fit the number of hosts.
    """

    device: DevicePart
    host: HostPart
    hosts: int
    network: Network = field(default_factory=Network)
    device_mtbf: float = 0.0
    overlaps: bool = True
    name: str = "cluster"

    def __post_init__(self) -> None:
        if self.network.topology not in TOPOLOGIES:
            raise ConfigError(
                f"{self.name}: network.topology = {self.network.topology!r} does not exist; write one of "
                f"{', '.join(TOPOLOGIES)}"
            )
        if self.network.topology == "torus":
            count = 1
            for side in self.network.shape:
                count *= side
            if count != self.hosts:
                raise ConfigError(
                    f"{self.name}: network.shape = {list(self.network.shape)} has {count} hosts, but there are "
                    f"{self.hosts}; write sides whose product is {self.hosts}"
                )

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.hosts * self.host.devices

    def ranks_on_host(self, ranks: int) -> int:
        """Return the number of ranks that share the disks and the memory of the fullest host of a run."""
        return min(ranks, self.host.devices)

    def host_of(self, rank: int) -> int:
        """Return the host of a rank: ranks fill hosts in order."""
        return rank // self.host.devices

    def with_devices(self, count: int) -> Cluster:
        """Return the cluster with as many hosts as `count` ranks need.

        A network of explicit links or a torus cannot shrink, so the cluster keeps its unused hosts.

        Raises:
            ConfigError: such a network has fewer hosts than the ranks need.
        """
        hosts = -(-count // self.host.devices)
        if hosts == self.hosts:
            return self
        if self.network.topology in ("torus", "links") and hosts > self.hosts:
            raise ConfigError(
                f"{self.name}: {count} ranks need {hosts} hosts of {self.host.devices} devices, and the network has "
                f"{self.hosts}; add hosts and their links, or use fewer ranks"
            )
        if self.network.topology in ("torus", "links"):
            return self
        return Cluster(self.device, self.host, hosts, self.network, self.device_mtbf, self.overlaps, self.name)

    def link_part(self, kind: str) -> LinkPart:
        """Return rate and latency of links of a kind. The uplinks of a switch are one link."""
        network, host = self.network, self.host
        if kind == "device" or kind.startswith(AXIS_LINK):
            part = host.axis_links[kind.removeprefix(AXIS_LINK)] if kind != "device" else host.device_link
            return replace(part, rate=part.rate / max(1, host.devices - 1)) if host.mesh == "mesh" else part
        if kind == "nic":
            return LinkPart(host.nic.rate, host.nic.latency, host.nic.efficiency)
        if kind == "leaf":
            below = network.hosts_per_leaf * (host.nics if network.topology == "fat-tree" else 1)
            return LinkPart(
                host.nic.rate * below / network.oversubscription, network.switch_latency, host.nic.efficiency
            )
        return self._explicit[kind].part

    def along(self, axis: str) -> Cluster:
        """Return a copy in which the devices of a host are connected by the link of `axis` in `HostPart.axis_links`."""
        return replace(self, host=replace(self.host, device_link=self.host.axis_links[axis], axis_links={}))

    @cached_property
    def _explicit(self) -> dict[str, ExplicitLink]:
        return {f"{_quoted(one.source)}-{_quoted(one.target)}": one for one in self.network.links}

    @cached_property
    def graph(self) -> nx.DiGraph[str]:
        """Graph of hosts and switches, with explicit links or the links of a ring or torus."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        for host in range(self.hosts):
            graph.add_node(f"host {host}")
        for kind, one in self._explicit.items():
            graph.add_edge(one.source, one.target, kind=kind)
            graph.add_edge(one.target, one.source, kind=kind)
        if self.network.topology in ("ring", "torus"):
            sides = self.network.shape if self.network.topology == "torus" else (self.hosts,)
            lattice = nx.grid_graph(dim=list(reversed(sides)), periodic=[side > 2 for side in reversed(sides)])
            for a, b in lattice.edges:
                for source, target in ((a, b), (b, a)):
                    graph.add_edge(_host_at(source, sides), _host_at(target, sides), kind="nic")
        return graph

    def route(self, a: int, b: int) -> list[DirectedLink]:
        """Return the directed links from device `a` to device `b`."""
        if a == b:
            return []
        here, there = self.host_of(a), self.host_of(b)
        if here == there:
            return self._inside(a, b)
        if self.network.topology in ("ring", "torus", "links"):
            return [
                DirectedLink("device", f"device {a}", f"host {here}"),
                *self._between(here, there),
                DirectedLink("device", f"host {there}", f"device {b}"),
            ]
        return self._through_switches(a, b)

    def _inside(self, a: int, b: int) -> list[DirectedLink]:
        host = self.host
        if host.mesh == "mesh":
            return [DirectedLink("device", f"device {a}", f"device {b}")]
        if host.mesh == "ring":
            first, count = self.host_of(a) * host.devices, host.devices
            start, steps = a - first, (b - a) % count
            sign = 1 if steps <= count - steps else -1
            stops = [first + (start + sign * i) % count for i in range(min(steps, count - steps) + 1)]
            return [DirectedLink("device", f"device {x}", f"device {y}") for x, y in pairwise(stops)]
        middle = f"host {self.host_of(a)}"
        return [DirectedLink("device", f"device {a}", middle), DirectedLink("device", middle, f"device {b}")]

    def nic_of(self, rank: int) -> int:
        """Return the number of a rank's network card on its host."""
        return (rank % self.host.devices) * self.host.nics // self.host.devices

    def _through_switches(self, a: int, b: int) -> list[DirectedLink]:
        here, there, network = self.host_of(a), self.host_of(b), self.network
        out, into = self.nic_of(a), self.nic_of(b)
        hops: list[DirectedLink] = []
        if network.topology == "rail" and out != into:
            # The message first moves to a device on the target's rail, so that it stays on one leaf switch.
            hops.append(DirectedLink("device", f"device {a}", f"host {here}"))
            out = into
        hops.append(DirectedLink("nic", f"host {here} nic {out}", "network"))
        leaf, other = (self._leaf(here, out), self._leaf(there, into))
        if leaf != other:
            hops += [DirectedLink("leaf", leaf, "spine"), DirectedLink("leaf", "spine", other)]
        hops.append(DirectedLink("nic", "network", f"host {there} nic {into}"))
        return hops

    def _leaf(self, host: int, nic: int) -> str:
        network = self.network
        if network.topology == "switch":
            return "leaf 0"
        number = host // network.hosts_per_leaf
        return f"leaf {number} rail {nic}" if network.topology == "rail" else f"leaf {number}"

    def _between(self, here: int, there: int) -> Iterator[DirectedLink]:
        if (here, there) not in self._paths:
            self._paths[here, there] = nx.shortest_path(self.graph, f"host {here}", f"host {there}")
        for source, target in pairwise(self._paths[here, there]):
            yield DirectedLink(self.graph.edges[source, target]["kind"], source, target)

    @cached_property
    def _paths(self) -> dict[tuple[int, int], list[str]]:
        return {}

    @property
    def is_symmetric(self) -> bool:
        """True if all hosts are connected in the same way."""
        return self.network.topology != "links"

    @property
    def sample_hosts(self) -> int:
        """Number of hosts, from the first one, whose links stand for all others."""
        if not self.is_symmetric or self.network.topology in ("ring", "torus"):
            return self.hosts
        if self.network.topology == "switch":
            return 1
        return min(self.hosts, self.network.hosts_per_leaf)

    def latency(self, links: Sequence[DirectedLink]) -> float:
        """Return the latency of a route, in seconds: the largest latency of its links, plus that of its switches."""
        ends = max((self.link_part(link.kind).latency for link in links), default=0.0)
        return ends + self.network.switch_latency * max(0, len(links) - 2)


def _quoted(name: str) -> str:
    """Return the name of a switch or host, in quotes if it has a hyphen, so that names of links are unique."""
    return repr(name) if "-" in name else name


def _host_at(place: object, sides: tuple[int, ...]) -> str:
    places = place if isinstance(place, tuple) else (place,)
    number = 0
    for side, at in zip(sides, places, strict=True):
        number = number * side + int(at)
    return f"host {number}"
