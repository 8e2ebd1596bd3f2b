"""Tests of cluster files: values that replace those of known parts, links between hosts, and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from windlass.base.errors import ConfigError
from windlass.cli.benches.device_bench import parse_dtypes, run_device_bench
from windlass.simulate.cluster import Cluster
from windlass.simulate.cluster_file import load_cluster
from windlass.simulate.hardware_parts import DEVICES, LinkPart, parse_rate, parse_seconds

LINKS = """
hosts = 3
switches = ["leaf"]
[device]
part = "h100"
[host]
part = "dgx-h100"
[[links]]
from = "host 0"
to = "leaf"
rate = "100Gbps"
latency = "2us"
[[links]]
from = "host 1"
to = "leaf"
rate = "100Gbps"
[[links]]
from = "leaf"
to = "host 2"
rate = "10Gbps"
"""


def load(folder: Path, text: str, world: int = 8) -> object:
    path = folder / "cluster.toml"
    path.write_text(text)
    return load_cluster(str(path), world)


def test_files_replace_values_of_known_parts(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        'name = "lab"\ncluster = "dgx-a100"\ndevice_mtbf_hours = 100\n'
        '[device]\nflops = {bf16 = "300TFLOP/s"}\nmemory = "40GB"\nlaunch = "10us"\n'
        '[host]\ndevices = 4\nnics = 1\nnic = {rate = "100Gbps", latency = "5us", efficiency = 0.9}\n'
        '[network]\ntopology = "fat-tree"\nhosts_per_leaf = 2\noversubscription = 4\n'
    )
    found = load_cluster(str(path), 16)
    assert (found.name, found.hosts, found.devices, found.device_mtbf) == ("lab", 4, 16, 360_000)
    assert found.device.flops == {"bf16": 300e12} and found.device.launch_seconds == pytest.approx(1e-5)
    assert found.device.memory_rate == DEVICES["a100"].memory_rate
    assert found.host.nic.usable == pytest.approx(0.9 * 12.5e9)
    assert found.link_part("leaf").rate == pytest.approx(2 * 12.5e9 / 4)


def test_links_of_an_axis_take_what_they_leave_out_from_the_device_link(tmp_path: Path) -> None:
    text = """
cluster = "cpu"
[host]
devices = 4
[host.axis_links]
tp = {rate = "1GB/s", latency = "1ms"}
pp = "3GB/s"
"""
    found = load(tmp_path, text, world=4)
    assert isinstance(found, Cluster)
    plain, links = found.host.device_link, found.host.axis_links
    assert links["tp"] == LinkPart(1e9, 1e-3, plain.efficiency)
    assert links["pp"] == LinkPart(3e9, plain.latency, plain.efficiency)
    for wrong, message in (
        ('dp = "1GB/s"', "host.axis_links.dp"),
        ('tp = "fast"', "host.axis_links.tp = 'fast' is not a rate"),
        ("tp = {speed = 1}", "host.axis_links.tp.speed"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load(tmp_path, f'cluster = "cpu"\n[host.axis_links]\n{wrong}\n')
    with pytest.raises(ConfigError, match=re.escape("write [host.axis_links]")):
        load(tmp_path, 'cluster = "cpu"\n[host]\naxis_links = "1GB/s"\n')


def test_explicit_links_are_routed(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(LINKS)
    found = load_cluster(str(path), 24)
    assert [link.kind for link in found.route(0, 16)] == ["device", "host 0-leaf", "leaf-host 2", "device"]
    assert found.link_part("leaf-host 2").rate == pytest.approx(1.25e9)


def test_links_between_switches_with_hyphens_stay_apart(tmp_path: Path) -> None:
    """`a` to `b-c` and `a-b` to `c` are two links."""
    pairs = [("host 0", "a"), ("a", "b-c"), ("b-c", "host 1"), ("host 1", "a-b"), ("a-b", "c"), ("c", "host 2")]
    links = "".join(f'[[links]]\nfrom = "{a}"\nto = "{b}"\nrate = {at}e9\n' for at, (a, b) in enumerate(pairs, 1))
    found = load(tmp_path, LINKS.partition("[[links]]")[0].replace('["leaf"]', '["a", "b-c", "a-b", "c"]') + links, 24)
    assert isinstance(found, Cluster)
    rates = [found.link_part(link.kind).rate for link in found.route(0, 16)[1:-1]]
    assert rates == [at * 1e9 for at in range(1, 7)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            LINKS.replace('to = "leaf"', 'to = "leaf 9"', 1),
            "links[0].to = 'leaf 9' is neither a host nor a switch; write a host from 'host 0' to 'host 2' or one of "
            "the switches leaf, or add it to switches",
        ),
        (LINKS.replace('"host 2"', '"host 3"'), "links[2].to = 'host 3' is neither a host nor a switch"),
        (LINKS.replace('"host 2"', '"leaf"'), "links[2].to = 'leaf' is the same as from"),
        (
            LINKS.replace('from = "leaf"\nto = "host 2"', 'from = "host 0"\nto = "host 1"'),
            "no links lead from 'host 0' to 'host 2'",
        ),
        (
            LINKS.replace('to = "host 2"', 'to = "host 1"'),
            "links[2].to = 'host 1' is linked with 'leaf' already; write one link with the sum of the rates",
        ),
        (LINKS.replace('rate = "10Gbps"', ""), "links[2].rate is missing"),
        (LINKS.replace("10Gbps", "fast"), "links[2].rate = 'fast' is not a rate; write e.g. 400Gbps"),
        (LINKS.replace("2us", "soon"), "links[0].latency = 'soon' is not a time"),
        (LINKS.replace("hosts = 3", "hosts = 0"), "hosts = 0 is not a whole number from 1"),
        ("[device]\npart = 'b9'", "device.part = 'b9' is not a known device; write one of v100"),
        ("[device]\npart = ['h100']", "device.part = ['h100'] is not a known device"),
        ("cluster = 'cpu'\n[host]\npart = {}", "host.part = {} is not a known host"),
        ("cluster = 'cpu'\n[network]\nshape = [true, 2]", "network.shape = [True, 2] is not a list of sides"),
        ("[device]\nflops = {bf16 = 1}", "device.memory is missing; write it (`windlass bench device` measures it)"),
        ("[device]\npart = 'h100'", 'host.device_link is missing; write e.g. device_link = "25GB/s" (`windlass bench'),
        (
            "[device]\npart = 'h100'\n[host]\ndevices = 4\ndevice_link = '1GB/s'",
            "host.nic is missing; write e.g. nic =",
        ),
        ("cluster = 'dgx-h100'\nspeed = 3", "speed = 3 is not a key; the keys are cluster"),
        ("cluster = 'dgx-h100'\n[network]\ntopology = 'star'", "network.topology = 'star' does not exist"),
        ("cluster = 'dgx-h100'\n[network]\ntopology = 'links'", "network.topology = 'links' needs [[links]]"),
        ("cluster = 'dgx-h100'\nhosts = 4\n[network]\ntopology = 'torus'\nshape = [3]", "sides whose product is 4"),
        ("cluster = 'dgx-h100'\n[host]\nmesh = 'web'", "host.mesh = 'web' does not exist; write one of switch"),
        (
            "cluster = 'dgx-h100'\n[device]\nmatmul_efficiency = 2",
            "device.matmul_efficiency = 2 is not a number from 0 to 1",
        ),
        ("cluster = 'dgx-h100'\n[device]\nmemory = '0'", "device.memory = '0' must be above 0"),
        (
            "cluster = 'dgx-h100'\n[device]\nflops = {bfloat = 1}",
            "device.flops.bfloat is not a dtype; write one of fp8, bf16",
        ),
        (
            "cluster = 'dgx-h100'\n[network]\noversubscription = 0",
            "network.oversubscription = 0.0 must be above 0",
        ),
        ("[device", "is not TOML"),
    ],
)
def test_mistakes_name_the_key_its_value_and_the_fix(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path, text)


def test_a_measured_device_is_a_section_of_a_cluster_file(tmp_path: Path) -> None:
    run_device_bench(parse_dtypes("fp32, bf16,fp32"), 64, tmp_path)
    found = load(tmp_path, (tmp_path / "cluster.toml").read_text() + '[host]\npart = "cpu-host"\n', world=2)
    assert isinstance(found, Cluster)
    measured = json.loads((tmp_path / "device.json").read_text())
    assert set(measured["flops"]) == set(found.device.flops) == {"fp32", "bf16"}
    for name, rate in measured["flops"].items():
        assert found.device.flops[name] == pytest.approx(rate, rel=1e-4) and rate > 1e6
    assert found.device.memory_rate == pytest.approx(measured["memory_rate"], rel=1e-4)
    assert found.device.launch_seconds == pytest.approx(measured["launch_seconds"], abs=1e-9)
    assert 0 < found.device.attention_efficiency <= 1 and found.device.matmul_efficiency == 1
    with pytest.raises(ConfigError, match="unknown dtype 'int8'"):
        parse_dtypes("int8")


def test_unknown_clusters_and_units() -> None:
    with pytest.raises(ConfigError, match="neither a known cluster nor a file; write one of dgx2, dgx-a100"):
        load_cluster("dgx-9", 8)
    assert parse_rate("400Gbps", "x") == 50e9 and parse_rate("2.5GB/s", "x") == 2.5e9
    assert parse_rate("2GiB/s", "x") == 2 << 30 and parse_rate("8MiB/s", "x") == 8 << 20
    assert parse_rate("989TFLOP/s", "x") == 989e12 and parse_rate(7, "x") == 7.0
    assert parse_seconds("3us", "x") == pytest.approx(3e-6) and parse_seconds("10ms", "x") == pytest.approx(0.01)
    for wrong in ("0GB/s", "", True, -1, None):
        with pytest.raises(ConfigError, match="x = .* is not a rate"):
            parse_rate(wrong, "x")
