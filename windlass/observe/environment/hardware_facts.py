"""Facts about processor, memory, GPUs and process limits."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from typing import Any

from windlass.observe.environment.try_fact import output_of

SHARED_MEMORY_PATH = "/dev/shm"


def cpu_facts() -> dict[str, Any]:
    """Return the processor's name, the number of cores, and the number that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else os.cpu_count()
    return {"name": _cpu_name(), "cores": os.cpu_count(), "usable": usable}


def _cpu_name() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_facts() -> dict[str, Any]:
    """Return the memory of the machine in bytes."""
    return {"total_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}


def shared_memory_facts() -> dict[str, Any]:
    """Return path, size and free bytes of /dev/shm. NCCL and data loaders use it; windlass' shm transport does not."""
    usage = shutil.disk_usage(SHARED_MEMORY_PATH)
    return {"path": SHARED_MEMORY_PATH, "total_bytes": usage.total, "free_bytes": usage.free}


def process_limits() -> dict[str, int | None]:
    """Return the limits of this process: open files, locked bytes, processes; None: unlimited."""
    import resource

    kinds = {
        "open_files": resource.RLIMIT_NOFILE,
        "locked_bytes": resource.RLIMIT_MEMLOCK,
        "processes": resource.RLIMIT_NPROC,
    }
    soft = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return {name: None if value < 0 or value >= sys.maxsize else value for name, value in soft.items()}


def gpu_devices() -> list[dict[str, Any]]:
    """List the GPUs in torch's order: name, bytes of memory, compute capability, multiprocessors."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        found.append(
            {
                "index": index,
                "name": gpu.name,
                "memory_bytes": gpu.total_memory,
                "capability": f"{gpu.major}.{gpu.minor}",
                "processors": gpu.multi_processor_count,
            }
        )
    return found


def nvidia_driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None if nvidia-smi is not installed."""
    if shutil.which("nvidia-smi") is None:
        return None
    return output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0].strip()
