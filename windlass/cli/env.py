"""`windlass env`: what a bug report needs to know about this machine; says what is missing and never fails for it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable

import typer

import windlass

_PACKAGES = (
    "numpy",
    "pydantic",
    "safetensors",
    "isal",
    "typer",
    "rich",
    "hjson",
    "transformers",
    "tokenizers",
    "datasets",
)
_GIB = 1 << 30


def env() -> None:
    """Print versions, hardware, transports and limits."""
    for name, ask in _FACTS.items():
        try:
            value = ask()
        except (ImportError, OSError, RuntimeError, ValueError, AttributeError) as error:
            value = f"unknown ({type(error).__name__}: {error})"
        typer.echo(f"{name:<12} {value}")


def _python() -> str:
    return f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})"


def _torch() -> str:
    import torch

    available = torch.distributed.is_available()
    return f"{torch.__version__}, {torch.get_num_threads()} threads, distributed {_yes(available)}"


def _packages() -> str:
    return ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    affinity = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else os.cpu_count()
    return f"{_cpu_name()}, {usable} of {os.cpu_count()} cores usable"


def _cpu_name() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none"
    names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return f"CUDA {torch.version.cuda}: " + ", ".join(f"{gpu.name} {gpu.total_memory / _GIB:.0f} GiB" for gpu in names)


def _transports() -> str:
    import torch

    shared = hasattr(os, "memfd_create")
    if shared:
        os.close(os.memfd_create("windlass-env"))
    nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    gloo = torch.distributed.is_gloo_available()
    return f"shm {_yes(shared)} (anonymous memory files), gloo {_yes(gloo)}, nccl {_yes(nccl)}"


def _kernels() -> str:
    from windlass.kernels.dispatch import KERNELS, path_in_use

    return f"{path_in_use()} for each of {', '.join(KERNELS)}"


def _disk() -> str:
    from windlass import storage

    return storage.path_in_use()


def _dev_shm() -> str:
    usage = shutil.disk_usage("/dev/shm")
    return f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"


def _memory() -> str:
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / _GIB:.1f} GiB"


def _limits() -> str:
    import resource

    kinds = {"open files": "RLIMIT_NOFILE", "locked memory": "RLIMIT_MEMLOCK", "processes": "RLIMIT_NPROC"}
    values = {name: resource.getrlimit(getattr(resource, kind))[0] for name, kind in kinds.items()}
    return ", ".join(f"{name} {_limit(value)}" for name, value in values.items())


def _limit(value: int) -> str:
    return "unlimited" if value < 0 or value == sys.maxsize else str(value)


def _variables() -> str:
    prefixes = ("WINDLASS_", "NCCL_", "GLOO_", "TORCH_")
    names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = [name for name in sorted(os.environ) if name.startswith(prefixes) or name in names]
    return " ".join(f"{name}={os.environ[name]}" for name in found) or "none that matter"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


_FACTS: dict[str, Callable[[], str]] = {
    "windlass": lambda: windlass.__version__,
    "python": _python,
    "system": platform.platform,
    "torch": _torch,
    "packages": _packages,
    "cpu": _cpu,
    "memory": _memory,
    "gpu": _gpu,
    "kernels": _kernels,
    "transports": _transports,
    "disk tier": _disk,
    "/dev/shm": _dev_shm,
    "limits": _limits,
    "environment": _variables,
}
