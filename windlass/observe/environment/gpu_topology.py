"""Connections between GPUs and network cards of this machine, parsed from `nvidia-smi topo -m`."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from windlass.observe.environment.try_fact import output_of

LINK_CLASSES = {
    "NV": "NVLink, # of them together",
    "PIX": "PCIe, across one bridge at most",
    "PXB": "PCIe, across several bridges, not through the processor",
    "PHB": "PCIe, through the processor",
    "NODE": "PCIe, between bridges of one NUMA node",
    "SYS": "PCIe, and the link between NUMA nodes",
}
"""Link classes from near to far. The first stands for NV1, NV2, ..."""
_LINK_PATTERN = re.compile(r"X|NV\d+|" + "|".join(name for name in LINK_CLASSES if name != "NV"))
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines the header
_NIC_NAME = re.compile(r"(NIC\d+): (\S+)")
_EXTRA_COLUMNS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
# Most NVLinks of any GPU (Hopper, Blackwell). The table counts links to a switch once per peer, so that a larger sum
# over peers means a switch.
_MAX_NVLINKS_OF_GPU = 18


@dataclass(frozen=True)
class GpuTopology:
    """Links between GPUs and network cards.

    Attributes:
        gpus, cards: names in the table's order; cards are network interfaces.
        links: link class of each ordered pair, in both orders.
        cpus, numa: CPU and NUMA affinity of each GPU, in the driver's format: "0-47,96-143", "0". A GPU without an
            affinity is left out.
        card_names: device name of each card: NIC0 -> mlx5_0.
    """

    gpus: list[str]
    cards: list[str]
    links: dict[tuple[str, str], str]
    cpus: dict[str, str]
    numa: dict[str, str]
    card_names: dict[str, str]


def query_topology() -> dict[str, Any] | None:
    """Return `topology_to_json(parse_topology(...))` of this machine; None if nvidia-smi is not installed."""
    return (
        topology_to_json(parse_topology(output_of("nvidia-smi", "topo", "-m"))) if shutil.which("nvidia-smi") else None
    )


def parse_topology(table: str) -> GpuTopology:
    """Parse the output of `nvidia-smi topo -m`.

    Raises:
        ValueError: the text is not such a table, or a row is missing or cannot be parsed; the message names the row.
    """
    lines = [_TERMINAL_CODES.sub("", line).rstrip() for line in table.splitlines()]
    start = next((number for number, line in enumerate(lines) if re.match(r"\s+GPU0\b", line)), None)
    if start is None:
        raise ValueError(f"this is not a table of nvidia-smi topo -m: {' / '.join(lines[:2]) or 'it is empty'}")
    columns = re.sub("|".join(_EXTRA_COLUMNS), "", lines[start]).split()
    gpus = [name for name in columns if re.fullmatch(r"GPU\d+", name)]
    found = GpuTopology(gpus, [name for name in columns if name not in gpus], {}, {}, {}, {})
    for line in lines[start + 1 :]:
        fields = line.split()
        if not fields or fields[0] not in columns:
            found.card_names.update(_NIC_NAME.findall(line))
            continue
        _read_row(found, columns, fields[0], fields[1:], line)
    missing = [name for name in columns if (name, name) not in found.links]
    if missing:
        raise ValueError(f"nvidia-smi topo -m has no row for {', '.join(missing)}")
    return found


def _read_row(found: GpuTopology, columns: list[str], name: str, fields: list[str], line: str) -> None:
    classes, rest = fields[: len(columns)], fields[len(columns) :]
    if len(classes) < len(columns) or not all(_LINK_PATTERN.fullmatch(one) for one in classes):
        raise ValueError(f"a row of nvidia-smi topo -m cannot be parsed: {line.strip()}")
    found.links.update({(name, other): one for other, one in zip(columns, classes, strict=True)})
    for affinity, value in zip((found.cpus, found.numa), rest, strict=False):
        if name in found.gpus and value != "N/A":
            affinity[name] = value


def link_distance(link: str) -> tuple[int, int]:
    """Return a sort key for link classes: near before far, more NVLinks before fewer."""
    return (0, -int(link[2:])) if link.startswith("NV") else (list(LINK_CLASSES).index(link), 0)


def count_gpu_links(topology: GpuTopology) -> dict[str, int]:
    """Count the pairs of GPUs of each link class, nearest class first."""
    pairs = Counter(topology.links[pair] for pair in combinations(topology.gpus, 2))
    return {link: pairs[link] for link in sorted(pairs, key=link_distance)}


def classify_nvlink(topology: GpuTopology) -> str:
    """Return how NVLinks connect the GPUs: `none`, `some pairs`, `all pairs` or `switch`.

    `switch`: the links of a GPU to all others add up to more than any GPU has, so they lead to an NVSwitch. `all pairs`
    leaves open whether the links are direct or through a switch, because the table does not show it.
    """
    between = count_gpu_links(topology)
    if not any(link.startswith("NV") for link in between):
        return "none"
    if not all(link.startswith("NV") for link in between):
        return "some pairs"
    first = topology.gpus[0]
    total = sum(int(topology.links[first, other][2:]) for other in topology.gpus[1:])
    return "switch" if total > _MAX_NVLINKS_OF_GPU else "all pairs"


def nearest_cards(topology: GpuTopology) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each GPU, the link class of its nearest network cards, and the cards' names; nothing without cards."""
    for gpu in topology.gpus:
        by_class: dict[str, list[str]] = {}
        for card in topology.cards:
            by_class.setdefault(topology.links[gpu, card], []).append(topology.card_names.get(card, card))
        if by_class:
            best = min(by_class, key=link_distance)
            yield gpu, best, by_class[best]


def topology_to_json(topology: GpuTopology) -> dict[str, Any]:
    """Convert the topology to plain data for JSON."""
    everyone = [*topology.gpus, *topology.cards]
    return {
        "gpus": topology.gpus,
        "cards": {card: topology.card_names.get(card) for card in topology.cards},
        "links": {one: {other: topology.links[one, other] for other in everyone} for one in everyone},
        "nvlink": classify_nvlink(topology),
        "pairs": count_gpu_links(topology),
        "nearest_cards": {gpu: {"class": best, "cards": cards} for gpu, best, cards in nearest_cards(topology)},
        "cpus": topology.cpus,
        "numa": topology.numa,
    }
