"""Cluster file of measured rates, which the experiments of `windlass bench` complete table by table."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from windlass.base.atomic_file import write_atomically
from windlass.base.errors import ConfigError
from windlass.base.regular_file import read_regular
from windlass.simulate.hardware_parts import LinkPart

CLUSTER_FILE = "cluster.toml"


def set_measured(path: Path, table: str, values: Mapping[str, Any]) -> None:
    """Set values in one table of a cluster file, and make the file or the table if it is absent. Other lines stay.

    Args:
        values: strings, numbers and dicts of them, by key.

    Raises:
        ConfigError: the file is not TOML, or has the table in another form than lines below `[table]`.
    """
    lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
    try:
        text = read_regular(path).decode() if path.exists() else ""
        expected = tomllib.loads(text)
        old = text.splitlines()
        begin = next((index for index, line in enumerate(old) if _header(line) == table), None)
        if begin is None:
            new = [*old, *([""] if old else []), f"[{table}]", *lines]
        else:
            end = next((index for index in range(begin + 1, len(old)) if _header(old[index])), len(old))
            kept = [line for line in old[begin + 1 : end] if _key(line) not in values]
            new = [*old[: begin + 1], *lines, *kept, *old[end:]]
        written = "\n".join(new) + "\n"
        expected[table] = {**expected.get(table, {}), **values}
        if tomllib.loads(written) != expected:
            raise ValueError(f"[{table}] is not written as one key a line")
    except (ValueError, TypeError) as error:  # tomllib's and Unicode's errors are ValueErrors
        raise ConfigError(
            f"{path}: cannot set measured values: {error}; correct the file, or write them into [{table}] by hand: "
            f"{'; '.join(lines)}"
        ) from None
    write_atomically(path, written)


def measured_device_link(rows: Sequence[Mapping[str, Any]], ranks: int) -> LinkPart | None:
    """Return the latency and rate of the link of each rank that fit measured collectives best, by relative errors.

    A step of a ring collective, and a message between two ranks, takes the latency plus its bytes over the rate
    (Thakur et al. 2005, section 3). A ring all-reduce of `n` ranks has `2 (n - 1)` steps of `1 / n` of the bytes;
    all-gather and reduce-scatter have `n - 1` steps of a rank's message.

    Args:
        rows: operations with their `nbytes` and `seconds`; other operations than those above are left out.

    Returns:
        The link; None if no operation is left.
    """
    steps = {
        "all_reduce": (2 * (ranks - 1), 1 / ranks),
        "all_gather": (ranks - 1, 1.0),
        "reduce_scatter": (ranks - 1, 1.0),
        "pt2pt": (1, 1.0),
    }
    found = [(*steps[row["operation"]], row["nbytes"], row["seconds"]) for row in rows if row["operation"] in steps]
    if ranks < 2 or not found:
        return None
    # each row divided by its time, so that short messages count as much as long ones
    factors = torch.tensor([[k / t, k * part * nbytes / t] for k, part, nbytes, t in found], dtype=torch.float64)
    scale = factors.amax(dim=0)
    ones = torch.ones(len(found), 1, dtype=torch.float64)
    latency, per_byte = (torch.linalg.lstsq(factors / scale, ones).solution.flatten() / scale).tolist()
    if len({nbytes for *_, nbytes, _ in found}) == 1 or latency < 0 or per_byte <= 0:
        column = factors[:, 1]
        latency, per_byte = 0.0, float(column.sum() / column.square().sum())
    return LinkPart(1 / per_byte, latency, 1.0)


def link_values(link: LinkPart) -> dict[str, Any]:
    """Return a link as the value of a key of a cluster file. A measured rate has the efficiency 1."""
    return {"rate": f"{link.rate / 1e9:.6g}GB/s", "latency": f"{link.latency * 1e6:.3f}us", "efficiency": 1.0}


def _header(line: str) -> str:
    found = re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line)
    return found.group(1) if found else ""


def _key(line: str) -> str:
    return line.partition("=")[0].strip()


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)  # strings and numbers have the same form in TOML
