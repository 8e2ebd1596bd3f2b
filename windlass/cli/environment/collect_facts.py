"""Collection of all facts as plain data, which `windlass env --json` prints and `format_facts` formats."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from windlass.base.errors import StorageError
from windlass.observe.environment import (
    backend_support,
    costly_settings,
    gpu_topology,
    hardware_facts,
    network_facts,
    version_facts,
)
from windlass.observe.environment.try_fact import is_unknown, try_fact

FACTS_FORMAT = 1
"""Version of the JSON format. Increased when a key is removed or changes its meaning, not when keys are added."""
_PROBE_BYTES = 128 << 20


def collect_facts(disk: Path | None = None) -> dict[str, Any]:
    """Collect all facts by name. A fact that could not be determined is `{"unknown": reason}`.

    Args:
        disk: folder whose disk is measured; None measures none.
    """
    facts: dict[str, Any] = {
        "format": FACTS_FORMAT,
        "windlass": try_fact(version_facts.windlass_facts),
        "python": try_fact(version_facts.python_facts),
        "system": try_fact(platform.platform),
        "torch": try_fact(version_facts.torch_facts),
        "packages": try_fact(version_facts.package_versions),
        "cpu": try_fact(hardware_facts.cpu_facts),
        "memory": try_fact(hardware_facts.memory_facts),
        "devices": try_fact(hardware_facts.gpu_devices),
        "driver": try_fact(hardware_facts.nvidia_driver_version),
        "topology": try_fact(gpu_topology.query_topology),
        "network": try_fact(network_facts.network_interfaces),
        "infiniband": try_fact(network_facts.infiniband_devices),
        "kernels": try_fact(_kernel_facts),
        "backends": try_fact(backend_support.backend_availability),
        "collectives": backend_support.collective_support(),
        "operators": backend_support.operator_support(),
        "disk": {
            "engine": try_fact(disk_engine),
            "rates": None if disk is None else try_fact(lambda: disk_rates(disk)),
        },
        "shared_memory": try_fact(hardware_facts.shared_memory_facts),
        "limits": try_fact(hardware_facts.process_limits),
        "variables": try_fact(version_facts.relevant_variables),
    }
    facts["settings"] = try_fact(lambda: _costly_settings(facts))
    return facts


def _kernel_facts() -> dict[str, Any]:
    from windlass.kernels.kernel_dispatch import NATIVE_RULES, get_active_kernel_path, list_kernel_paths

    chosen = get_active_kernel_path()
    return {
        "path": chosen.name,
        "native": chosen.is_native,
        "why": chosen.reason,
        "paths": list_kernel_paths(),
        "rules": list(NATIVE_RULES),
    }


def _costly_settings(facts: dict[str, Any]) -> list[dict[str, str]]:
    found = costly_settings.find_costly_settings(cores=_fact_or_none(facts, "cpu", "usable"))
    return found + costly_settings.find_low_limits(
        costly_settings.MachineLimits(
            num_gpus=0 if is_unknown(facts["devices"]) else len(facts["devices"]),
            has_infiniband=bool(facts["infiniband"]) and not is_unknown(facts["infiniband"]),
            locked_bytes=_fact_or_none(facts, "limits", "locked_bytes"),
            open_files=_fact_or_none(facts, "limits", "open_files"),
            shared_bytes=_fact_or_none(facts, "shared_memory", "total_bytes"),
        )
    )


def _fact_or_none(facts: dict[str, Any], section: str, key: str) -> int | None:
    return None if is_unknown(facts[section]) else facts[section][key]


def disk_engine() -> str:
    """Return the name of the I/O engine that would be used, and the reason."""
    from windlass import storage

    return storage.default_io_engine()


def disk_rates(folder: Path) -> dict[str, Any]:
    """Measure write and read rate of the disk of `folder` by direct I/O: 128 MiB each way, under a second on an SSD.

    Raises:
        StorageError: the folder cannot be used; the message gives the reason.
    """
    from windlass.storage import DiskTier, inspect_disk_path

    if not folder.is_dir():  # the disk tier would create the folder
        raise StorageError(f"{folder} is not a directory; give one on the disk to measure")
    prospect = inspect_disk_path(folder)
    with DiskTier([folder], label="windlass-env") as tier:
        found = tier.measure_rates(_PROBE_BYTES)
    return {
        "folder": str(folder),
        "file_system": prospect.filesystem,
        "memory": prospect.is_memory,
        "free_bytes": prospect.free_bytes,
        "measured_bytes": _PROBE_BYTES,
        "read_bytes_per_second": round(found.read_rate),
        "write_bytes_per_second": round(found.write_rate),
    }
