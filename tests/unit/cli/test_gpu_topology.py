"""Tests of parsing `nvidia-smi topo -m` as the driver prints it on several kinds of machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass.cli.environment.format_facts import format_facts
from windlass.observe.environment import gpu_topology

TABLES = Path(__file__).parents[2] / "data" / "topology"
MACHINES = {
    "one_gpu": (1, 0, "none", {}),
    "two_gpus_pcie": (2, 0, "none", {"PHB": 1}),
    "four_gpus_two_sockets": (4, 0, "none", {"NODE": 2, "SYS": 4}),
    "four_gpus_bridged_pairs": (4, 0, "some pairs", {"NV4": 2, "SYS": 4}),
    "four_gpus_direct": (4, 4, "all pairs", {"NV6": 6}),
    "eight_gpus_cube": (8, 4, "some pairs", {"NV2": 8, "NV1": 8, "SYS": 12}),
    "eight_gpus_nvswitch": (8, 8, "switch", {"NV12": 28}),
}


def read(machine: str) -> gpu_topology.GpuTopology:
    return gpu_topology.parse_topology((TABLES / f"{machine}.txt").read_text())


@pytest.mark.parametrize("machine", MACHINES)
def test_every_class_of_connection_is_read(machine: str) -> None:
    gpus, cards, nvlink, pairs = MACHINES[machine]
    result = read(machine)
    assert (len(result.gpus), len(result.cards)) == (gpus, cards)
    assert gpu_topology.classify_nvlink(result) == nvlink
    assert gpu_topology.count_gpu_links(result) == pairs and list(gpu_topology.count_gpu_links(result)) == list(pairs)
    assert all(result.links[item, other] == result.links[other, item] for item, other in result.links)


def test_every_table_of_the_data_folder_is_tested() -> None:
    assert {path.stem for path in TABLES.iterdir()} == set(MACHINES)


def test_network_cards_have_system_names_and_the_nearest_is_reported() -> None:
    near = {gpu: (best, cards) for gpu, best, cards in gpu_topology.nearest_cards(read("eight_gpus_nvswitch"))}
    assert near["GPU0"] == ("PXB", ["mlx5_0", "mlx5_1"]) and near["GPU7"] == ("PXB", ["mlx5_6", "mlx5_7"])
    near = {gpu: (best, cards) for gpu, best, cards in gpu_topology.nearest_cards(read("eight_gpus_cube"))}
    assert near["GPU5"] == ("PIX", ["mlx5_2"])
    assert list(gpu_topology.nearest_cards(read("two_gpus_pcie"))) == []


def test_affinities_are_read_if_the_driver_reports_them() -> None:
    result = read("eight_gpus_nvswitch")
    assert result.cpus["GPU0"] == "0-63,128-191" and result.numa == {f"GPU{n}": str(n // 4) for n in range(8)}
    result = read("four_gpus_direct")
    assert set(result.cpus) == {"GPU0", "GPU1", "GPU2", "GPU3"} and "GPU3" not in result.numa
    assert read("eight_gpus_cube").numa == {}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("", "it is empty"),
        ("No devices were found\n", "No devices were found"),
        ("\tGPU0\tGPU1\nGPU0\t X \tPHB\n", "no row for GPU1"),
        ("\tGPU0\tGPU1\nGPU0\t X \tWARP\nGPU1\tPHB\t X \n", "WARP"),
        ("\tGPU0\tGPU1\nGPU0\t X \n", "cannot be parsed: GPU0"),
    ],
)
def test_text_without_a_table_is_refused(table: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        gpu_topology.parse_topology(table)


def test_table_is_printed_with_the_meaning_of_its_classes() -> None:
    from windlass.cli.environment.collect_facts import collect_facts

    facts = collect_facts() | {"topology": gpu_topology.topology_to_json(read("eight_gpus_nvswitch"))}
    text = "\n".join(format_facts(facts))
    assert "through NVSwitch; pairs of GPUs: NV12 28 (NVLink, 12 of them together)" in text
    assert "GPU0: nearest network card mlx5_0, mlx5_1 (PXB: PCIe, across several bridges" in text
    assert "GPU7: processors 64-127,192-255" in text
