"""Tests of the cluster file that experiments of `windlass bench` complete."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from windlass.base.errors import ConfigError
from windlass.cli.benches.measured_cluster import link_values, measured_device_link, set_measured
from windlass.comm.mesh_shape import MeshShape
from windlass.simulate.cluster import Cluster, Network
from windlass.simulate.cluster_file import load_cluster
from windlass.simulate.collective_cost import CollectiveCosts, RankPattern
from windlass.simulate.hardware_parts import DEVICES, HostPart, LinkPart

DEVICE = {"flops": {"fp32": "50GFLOP/s"}, "memory": "1024MiB", "memory_rate": "10GB/s", "launch": "2.5us"}
LINK = {"rate": "2GB/s", "latency": "20.5us", "efficiency": 1.0}


def test_measured_values_replace_those_of_their_keys_alone(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    set_measured(path, "device", DEVICE)
    set_measured(path, "host", {"devices": 2, "device_link": LINK})
    set_measured(path, "host", {"disk_read": "3GB/s", "disk_write": "1GB/s"})
    path.write_text("# two machines\n" + path.read_text() + '\n[network]\ntopology = "switch"  # one\n')
    set_measured(path, "host", {"disk_read": "2GB/s"})
    set_measured(path, "device", {**DEVICE, "launch": "4us"})
    text = path.read_text()
    assert text.startswith("# two machines\n[device]\n") and 'topology = "switch"  # one' in text
    assert tomllib.loads(text) == {
        "device": {**DEVICE, "launch": "4us"},
        "host": {"devices": 2, "device_link": LINK, "disk_read": "2GB/s", "disk_write": "1GB/s"},
        "network": {"topology": "switch"},
    }
    found = load_cluster(str(path), 2)
    assert found.host.device_link == found.host.nic == LinkPart(2e9, 20.5e-6, 1.0)
    assert (found.host.disk_read, found.device.launch_seconds) == (2e9, pytest.approx(4e-6))
    with pytest.raises(ConfigError, match=r"host\.nic is missing"):
        load_cluster(str(path), 4)  # the link between hosts was not measured


@pytest.mark.parametrize(
    "text",
    [
        "host = {devices = 2}\n",
        "host.devices = 2\n",
        '[host]\ndisk_read = """\n1GB/s"""\n',
        "[host\n",
        "host = 1\n",
        b"\xff",
    ],
)
def test_a_file_that_cannot_be_completed_is_left_alone(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = path.read_bytes()
    wanted = 'or write them into [host] by hand: disk_read = "2GB/s"'
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        set_measured(path, "host", {"disk_read": "2GB/s"})
    assert path.read_bytes() == before


def rows_of(link: LinkPart, ranks: int, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the times that `windlass simulate` predicts over a link, as rows of the measurement of collectives."""
    place = Cluster(DEVICES["cpu"], HostPart("host", ranks, link, link), 1, Network("switch"))
    costs, rows = CollectiveCosts(place, MeshShape(dp_shard=ranks)), []
    for size in sizes:
        for operation, times in (("all_reduce", 1), ("all_gather", ranks), ("reduce_scatter", ranks)):
            cost = costs.cost(RankPattern(("dp_shard",)), operation, float(size * times), "ring")
            rows.append({"operation": operation, "nbytes": size, "seconds": cost.seconds(place)})
        rows.append({"operation": "pt2pt", "nbytes": size, "seconds": costs.send(0, 1, float(size)).seconds(place)})
        rows.append({"operation": "broadcast", "nbytes": size, "seconds": 1.0})  # its algorithms differ: left out
    return rows


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("latency", [0.0, 3e-5])
def test_the_link_is_that_of_the_measured_collectives(ranks: int, latency: float) -> None:
    link = LinkPart(2e9, latency, 1.0)
    found = measured_device_link(rows_of(link, ranks, (1 << 10, 1 << 16, 1 << 20, 1 << 24)), ranks)
    assert found is not None and found.rate == pytest.approx(2e9, rel=1e-6)
    assert found.latency == pytest.approx(latency, abs=1e-9)
    assert link_values(found) == {"rate": "2GB/s", "latency": f"{latency * 1e6:.3f}us", "efficiency": 1.0}


def test_no_link_has_a_negative_latency() -> None:
    (row,) = [one for one in rows_of(LinkPart(2e9, 0.0, 1.0), 2, (1 << 20,)) if one["operation"] == "pt2pt"]
    assert measured_device_link([row], 2) == LinkPart(pytest.approx(2e9), 0.0, 1.0)
    # long messages that are slower than in proportion, as beyond a cache, would give a negative latency
    slower = {**row, "nbytes": row["nbytes"] * 16, "seconds": row["seconds"] * 32}
    found = measured_device_link([row, slower], 2)
    assert found is not None and found.latency == 0 and 1e9 < found.rate < 2e9
    assert measured_device_link([{**row, "operation": "broadcast"}], 2) is None
    assert measured_device_link([row], 1) is None
