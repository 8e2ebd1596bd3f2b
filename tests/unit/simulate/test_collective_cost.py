"""Tests of routes, collectives and shared links against their formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import networkx as nx
import pytest

from windlass.base.errors import ConfigError
from windlass.comm.mesh_shape import MeshShape
from windlass.simulate.cluster import Cluster, Network
from windlass.simulate.cluster_file import known_cluster
from windlass.simulate.collective_cost import CollectiveCosts, RankPattern
from windlass.simulate.event_loop import EventLoop, SimulatedTask
from windlass.simulate.hardware_parts import DEVICES, HostPart, LinkPart

DATA = RankPattern(("dp_shard",))
RATE, LATENCY = 1e9, 1e-5


def cluster(devices: int, hosts: int = 1, **network: object) -> Cluster:
    link = LinkPart(RATE, LATENCY, 1.0)
    host = HostPart("plain", devices, link, replace(link, rate=RATE / 4), nics=devices)
    return Cluster(DEVICES["h100"], host, hosts, Network(switch_latency=0.0, **network))  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("nbytes", [1.0, 1e6, 1e10])
def test_ring_collectives_take_the_time_of_their_formula(ranks: int, nbytes: float) -> None:
    costs = CollectiveCosts(cluster(ranks), MeshShape(dp_shard=ranks))
    one = (ranks - 1) * LATENCY + nbytes * (ranks - 1) / ranks / RATE
    for operation, often in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        found = costs.cost(DATA, operation, nbytes, "ring").seconds(costs.cluster)
        assert math.isclose(found, often * one, rel_tol=1e-9)


def test_simulated_ring_all_reduce_takes_the_time_of_its_formula() -> None:
    costs = CollectiveCosts(cluster(8), MeshShape(dp_shard=8))
    cost, rates = costs.cost(DATA, "all_reduce", 1e9, "ring"), {("rank 0", "device"): RATE}
    loop = EventLoop(rates)
    before: list[SimulatedTask] = []
    for phase in cost.phases:
        loads = {("rank 0", kind): nbytes for kind, nbytes in phase.loads.items()}
        before = [loop.add(SimulatedTask("all-reduce", "data", (("rank 0", "zero"),), phase.latency, loads, before))]
    assert math.isclose(loop.run(), 2 * 7 * LATENCY + 2 * 1e9 * 7 / 8 / RATE, rel_tol=1e-9)


def test_all_to_all_pipeline_and_tree_take_the_time_of_their_formulas() -> None:
    costs = CollectiveCosts(cluster(4), MeshShape(dp_shard=4))
    assert math.isclose(costs.cost(DATA, "all_to_all", 4e9).seconds(costs.cluster), LATENCY + 3e9 / RATE, rel_tol=1e-9)
    assert math.isclose(costs.send(0, 1, 1e9).seconds(costs.cluster), LATENCY + 1.0, rel_tol=1e-9)
    hosts = CollectiveCosts(cluster(1, 8), MeshShape(dp_shard=8))
    ring = hosts.cost(DATA, "all_reduce", 8.0, "ring").seconds(hosts.cluster)
    tree = hosts.cost(DATA, "all_reduce", 8.0, "tree").seconds(hosts.cluster)
    assert math.isclose(tree, 2 * 3 * LATENCY + 16 / (RATE / 4), rel_tol=1e-2) and tree < ring
    assert hosts.cost(DATA, "all_reduce", 8.0).algorithm == "tree"
    assert hosts.cost(DATA, "all_reduce", 1e11).algorithm != "tree"


@pytest.mark.parametrize(
    ("operation", "inside", "across"),
    [("all_gather", 1, 1), ("reduce_scatter", 1, 1), ("all_reduce", 2, 2), ("broadcast", 1, 1)],
)
@pytest.mark.parametrize(("hosts", "devices"), [(4, 4), (2, 8), (3, 2)])
def test_hierarchical_collectives_take_the_time_of_their_formula(
    operation: str, inside: int, across: int, hosts: int, devices: int
) -> None:
    """The time is that of a ring on each host over the buffer, and of a ring over hosts for each device's part.

    Each ring over hosts has a network card of its own.
    """
    costs = CollectiveCosts(cluster(devices, hosts), MeshShape(dp_shard=hosts * devices))
    nbytes = 1e8
    near = (devices - 1) * LATENCY + nbytes * (devices - 1) / devices / RATE
    far = (hosts - 1) * LATENCY + nbytes / devices * (hosts - 1) / hosts / (RATE / 4)
    found = costs.cost(DATA, operation, nbytes, "hierarchical").seconds(costs.cluster)
    assert math.isclose(found, inside * near + across * far, rel_tol=1e-9)


def test_a_hierarchical_all_to_all_takes_the_time_of_its_formula() -> None:
    costs = CollectiveCosts(cluster(4, 3), MeshShape(dp_shard=12))
    found = costs.cost(DATA, "all_to_all", 1e8, "hierarchical").seconds(costs.cluster)
    near, far = LATENCY + 1e8 * 3 / 4 / RATE, LATENCY + 1e8 * 2 / 3 / (RATE / 4)
    assert math.isclose(found, near + far, rel_tol=1e-9)


@pytest.mark.parametrize("hosts", [3, 5, 7])
def test_collectives_on_a_ring_of_hosts_take_the_time_of_their_formulas(hosts: int) -> None:
    place, nbytes = cluster(1, hosts, topology="ring"), 1e8
    costs = CollectiveCosts(place, MeshShape(dp_shard=hosts))
    gathered = costs.cost(DATA, "all_gather", nbytes, "ring").seconds(place)
    share = nbytes * (hosts - 1) / hosts
    assert math.isclose(gathered, (hosts - 1) * LATENCY + share / (RATE / 4), rel_tol=1e-9)
    # In each direction, a host sends one part to each of the hosts at the distances 1 to `half`. A part for distance d
    # crosses d links, so each link carries 1 + 2 + ... + half parts.
    half = (hosts - 1) // 2
    exchanged = costs.cost(DATA, "all_to_all", nbytes).seconds(place)
    assert math.isclose(exchanged, LATENCY + nbytes / hosts * half * (half + 1) / 2 / (RATE / 4), rel_tol=1e-9)


def test_columns_of_a_torus_have_links_of_their_own_and_those_of_a_ring_share_them() -> None:
    grid, nbytes = MeshShape(dp_shard=3, tp=3), 1e8
    torus, ring = cluster(1, 9, topology="torus", shape=(3, 3)), cluster(1, 9, topology="ring")
    alone = nbytes * 2 / 3 / (RATE / 4)
    rows, columns = RankPattern(("tp",)), DATA
    for pattern in (rows, columns):
        found = CollectiveCosts(torus, grid).cost(pattern, "all_gather", nbytes, "ring").seconds(torus)
        assert math.isclose(found, 2 * LATENCY + alone, rel_tol=1e-9)
    # On the ring, hosts 0, 3 and 6 of a column are three links apart, so each link carries all three columns.
    found = CollectiveCosts(ring, grid).cost(columns, "all_gather", nbytes, "ring").seconds(ring)
    assert math.isclose(found, 2 * LATENCY + 3 * alone, rel_tol=1e-9)


def test_an_axis_with_links_of_its_own_takes_their_time_and_shares_no_rate() -> None:
    slow = LinkPart(RATE / 10, 5 * LATENCY, 1.0)
    plain = cluster(8)
    mixed = replace(plain, host=replace(plain.host, axis_links={"tp": slow, "pp": slow}))
    costs = CollectiveCosts(mixed, MeshShape(pp=2, dp_shard=2, tp=2))
    along_tp = costs.cost(RankPattern(("tp",)), "all_reduce", 1e9, "ring")
    assert set(along_tp.phases[0].loads) == {"device along tp"}
    assert math.isclose(along_tp.seconds(mixed), 2 * 5 * LATENCY + 10.0, rel_tol=1e-9)
    message = costs.send(0, 4, 1e9)
    assert math.isclose(message.seconds(mixed), 5 * LATENCY + 10.0, rel_tol=1e-9)
    data = costs.cost(DATA, "all_reduce", 1e9, "ring")
    assert set(data.phases[0].loads) == {"device"} and math.isclose(data.seconds(mixed), 2 * LATENCY + 1.0)
    both = RankPattern(("dp_shard", "tp"))
    assert set(costs.cost(both, "all_gather", 1.0).phases[0].loads) == {"device"}


def test_rings_over_hosts_use_every_network_card() -> None:
    costs = CollectiveCosts(cluster(4, 4, topology="rail"), MeshShape(dp_shard=16))
    found = costs.cost(DATA, "all_gather", 16.0, "ring").phases[0].loads
    assert math.isclose(found["nic"], 15.0 / 4)
    costs = CollectiveCosts(cluster(4, 4, topology="rail"), MeshShape(dp_shard=4, tp=4))
    assert math.isclose(costs.cost(DATA, "all_gather", 16.0, "ring").phases[0].loads["nic"], 12.0)
    near, far = RankPattern(("dp_shard",), block=2), RankPattern(("dp_shard",), stride=2)
    assert costs.group_of(5, near) == [1, 5] and costs.group_of(5, far) == [5, 13]


def test_groups_on_one_card_share_it() -> None:
    shared = Cluster(DEVICES["h100"], HostPart("h", 4, LinkPart(RATE), LinkPart(RATE)), 2)
    costs = CollectiveCosts(shared, MeshShape(dp_shard=2, tp=4))
    assert math.isclose(costs.cost(DATA, "all_gather", 2.0, "ring").phases[0].loads["nic"], 4.0)


def test_oversubscription_slows_what_leaves_a_leaf_switch() -> None:
    grid = MeshShape(dp_shard=8)
    fair = CollectiveCosts(cluster(1, 8, topology="fat-tree", hosts_per_leaf=4), grid)
    thin = CollectiveCosts(cluster(1, 8, topology="fat-tree", hosts_per_leaf=4, oversubscription=64.0), grid)
    inside = RankPattern(("dp_shard",), block=4)
    assert fair.cost(inside, "all_gather", 1e9).seconds(fair.cluster) == thin.cost(inside, "all_gather", 1e9).seconds(
        thin.cluster
    )
    assert thin.cost(DATA, "all_gather", 1e9).seconds(thin.cluster) > 10 * fair.cost(DATA, "all_gather", 1e9).seconds(
        fair.cluster
    )


@pytest.mark.parametrize(
    ("network", "hosts"), [({"topology": "ring"}, 6), ({"topology": "torus", "shape": (3, 4)}, 12)]
)
def test_routes_are_shortest_paths(network: dict[str, object], hosts: int) -> None:
    place = cluster(2, hosts, **network)
    for a in range(0, place.devices, 2):
        hops = nx.shortest_path_length(place.graph, "host 0", f"host {a // 2}")
        assert len(place.route(1, a)) == (hops + 2 if a else 2)
        assert sum(link.kind == "nic" for link in place.route(1, a)) == hops


@pytest.mark.parametrize("mesh", ["switch", "mesh", "ring"])
def test_ring_all_gather_uses_neighbours_on_every_mesh(mesh: str) -> None:
    place = cluster(4)
    place = replace(place, host=replace(place.host, mesh=mesh))
    costs = CollectiveCosts(place, MeshShape(dp_shard=4))
    rate = RATE / 3 if mesh == "mesh" else RATE
    expected = 3 * LATENCY + 3e9 / 4 / rate
    assert math.isclose(costs.cost(DATA, "all_gather", 1e9, "ring").seconds(place), expected, rel_tol=1e-9)


def test_transfers_divide_a_link_and_leave_what_they_cannot_use() -> None:
    loop = EventLoop({("a", "x"): 10.0, ("a", "y"): 2.0})
    both = loop.add(SimulatedTask("both", "data", (("a", "1"),), 0.0, {("a", "x"): 20.0, ("a", "y"): 20.0}))
    only = loop.add(SimulatedTask("only", "data", (("a", "2"),), 0.0, {("a", "x"): 80.0}))
    late = loop.add(SimulatedTask("late", "data", (("a", "2"),), 1.0, {("a", "y"): 4.0}, [only]))
    end = loop.run()
    # `y` limits `both` to rate 2, so `only` has the other 8 of `x`: both end at 20 / 2 = 80 / 8 = 10 s. Then `late`
    # takes 1 s of latency, and 4 / 2 s alone on `y`.
    assert (both.end, only.end, late.begin) == pytest.approx((10.0, 10.0, 10.0))
    assert end == pytest.approx(13.0) and loop.link_bytes["a", "x"] == 100.0
    assert loop.link_busy["a", "y"] == pytest.approx(12.0)


def test_streams_keep_their_order_and_cycles_are_refused() -> None:
    loop = EventLoop({})
    slow = loop.add(SimulatedTask("slow", "compute", (("a", "1"),), 3.0))
    first = loop.add(SimulatedTask("first", "compute", (("a", "2"),), 1.0, {}, [slow]))
    second = loop.add(SimulatedTask("second", "compute", (("a", "2"),), 1.0))
    assert loop.run() == 5.0 and first.begin == 3.0 and second.begin == 4.0
    loop = EventLoop({})
    first = loop.add(SimulatedTask("first", "compute", (("a", "1"),), 1.0))
    second = loop.add(SimulatedTask("second", "compute", (("a", "1"),), 1.0))
    first.after.append(second)
    first.missing, second.followers = 1, [first]
    with pytest.raises(ConfigError, match="wait for each other, the first is 'first'"):
        loop.run()


def test_wrong_algorithms_name_the_others() -> None:
    costs = CollectiveCosts(known_cluster("dgx-h100"), MeshShape(dp_shard=8))
    with pytest.raises(ConfigError, match="algorithm 'star' does not exist; write one of auto, ring"):
        costs.cost(DATA, "all_reduce", 1.0, "star")
    with pytest.raises(ConfigError, match="algorithm 'tree' does not apply to all_gather"):
        costs.cost(DATA, "all_gather", 1.0, "tree")
