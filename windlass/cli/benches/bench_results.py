"""Context of a measurement (machine, versions, commit), which every result file contains."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import windlass
from windlass.base.atomic_file import write_atomically

_PACKAGES = ("torch", "transformers", "deepspeed", "numpy")
_KIB_PER_GIB = 1 << 20


def run_facts() -> dict[str, Any]:
    """Collect time, command, machine, versions and commit as plain data."""
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *map(_without_folders, sys.argv[1:])]),
        "machine": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "load_average": [round(load, 2) for load in os.getloadavg()],
            "memory_gib": _meminfo("MemTotal"),
            "gpu": _gpu_name(),
        },
        "versions": {"python": platform.python_version(), "windlass": windlass.__version__, **_package_versions()},
        "commit": _git_commit(),
    }


def write_result(path: Path, result: dict[str, Any]) -> Path:
    """Write `run_facts()` and `result` as JSON, atomically. Return `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({**run_facts(), **result}, indent=1) + "\n")
    return path


def available_bytes() -> int | None:
    """Return the memory that new processes can allocate without swapping, or None if the system does not report it."""
    gib = _meminfo("MemAvailable")
    return None if gib is None else int(gib * 2**30)


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _meminfo(field: str) -> float | None:
    if sys.platform != "linux":
        return None
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return round(int(line.split()[1]) / _KIB_PER_GIB, 2)
    return None


def _gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _package_versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git_commit() -> str | None:
    """Return the commit of the running source, with `+` if tracked files differ; None outside a git checkout."""
    folder = Path(windlass.__file__).parent
    try:
        head = _git(folder, "rev-parse", "HEAD")
        tracked = _git(folder, "ls-files", "__init__.py")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return None if not tracked else head + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _without_folders(argument: str) -> str:
    """Return an argument of a command, with only the last part of an absolute path, since results are published."""
    name, sign, value = argument.rpartition("=")
    return f"{name}{sign}{Path(value).name}" if value.startswith("/") else argument
