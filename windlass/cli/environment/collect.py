"""All facts as plain data: what `windlass env --json` prints, and the lines are made of."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from windlass.cli.environment import backends, disks, hardware, network, settings, topology, versions
from windlass.cli.environment.fact import ask, is_unknown

FORMAT = 1
"""Raised when a key of the JSON goes, or means something else; new ones may come without."""


def collect(disk: Path | None = None) -> dict[str, Any]:
    """Everything, by name; what could not be found out is `{"unknown": why}`.

    Args:
        disk: a folder whose disk is measured.
    """
    facts: dict[str, Any] = {
        "format": FORMAT,
        "windlass": ask(versions.windlass_itself),
        "python": ask(versions.python),
        "system": ask(platform.platform),
        "torch": ask(versions.torch_itself),
        "packages": ask(versions.packages),
        "cpu": ask(hardware.cpu),
        "memory": ask(hardware.memory),
        "devices": ask(hardware.devices),
        "driver": ask(hardware.driver),
        "topology": ask(topology.ask_driver),
        "network": ask(network.interfaces),
        "infiniband": ask(network.infiniband),
        "kernels": ask(_kernels),
        "backends": ask(backends.available),
        "collectives": backends.collectives(),
        "operators": backends.operators(),
        "disk": {"engine": ask(disks.engine), "rates": None if disk is None else ask(lambda: disks.rates(disk))},
        "shared_memory": ask(hardware.shared_memory),
        "limits": ask(hardware.limits),
        "variables": ask(versions.variables),
    }
    facts["settings"] = ask(lambda: _settings(facts))
    return facts


def _kernels() -> dict[str, Any]:
    from windlass.kernels.dispatch import KERNELS, path_in_use, paths

    chosen = path_in_use()
    return {"path": chosen.name, "native": chosen.native, "why": chosen.why, "paths": paths(), "rules": list(KERNELS)}


def _settings(facts: dict[str, Any]) -> list[dict[str, str]]:
    found = settings.in_force(cores=_known(facts, "cpu", "usable"))
    return found + settings.narrow_limits(
        settings.Machine(
            gpus=0 if is_unknown(facts["devices"]) else len(facts["devices"]),
            infiniband=bool(facts["infiniband"]) and not is_unknown(facts["infiniband"]),
            locked_bytes=_known(facts, "limits", "locked_bytes"),
            open_files=_known(facts, "limits", "open_files"),
            shared_bytes=_known(facts, "shared_memory", "total_bytes"),
        )
    )


def _known(facts: dict[str, Any], section: str, key: str) -> int | None:
    return None if is_unknown(facts[section]) else facts[section][key]
