"""Backends that are available here, and the collectives that each backend supports natively.

`COLLECTIVES` and `OPERATORS` describe torch 2.10 and newer. Tests on two ranks check the entries of gloo and mpi. The
entries of nccl and ucc follow torch's sources (ProcessGroupNCCL, ProcessGroupUCC). mpi is windlass' own backend over
mpi4py; shm is windlass' own transport for CPU ranks of one host, which has only the collectives that training uses.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

BACKEND_NAMES = ("gloo", "nccl", "mpi", "ucc", "shm")
TENSOR_DEVICES = {"gloo": "CPU, GPU", "nccl": "GPU", "mpi": "CPU, GPU", "ucc": "CPU, GPU", "shm": "CPU"}
_ALL = ("gloo", "nccl", "mpi", "ucc")
COLLECTIVES: dict[str, tuple[str, ...]] = {
    "broadcast": _ALL,
    "reduce": _ALL,
    "all_reduce": _ALL,
    "gather": _ALL,
    "all_gather": (*_ALL, "shm"),
    "scatter": _ALL,
    "reduce_scatter": (*_ALL, "shm"),
    "all_to_all": _ALL,
    "send": _ALL,
    "recv": _ALL,
    "recv (any source)": ("gloo", "mpi"),
    "barrier": _ALL,
    "monitored_barrier": ("gloo",),
}
"""Backends that support each collective."""
OPERATORS: dict[str, tuple[str, ...]] = {
    "SUM": (*_ALL, "shm"),
    "AVG": _ALL,
    "PRODUCT": _ALL,
    "MIN": _ALL,
    "MAX": _ALL,
    "BAND": ("gloo", "mpi", "ucc"),
    "BOR": ("gloo", "mpi", "ucc"),
    "BXOR": ("gloo", "mpi", "ucc"),
    "PREMUL_SUM": ("nccl",),
}
"""Backends that reduce with each operator."""
COMPOSED_OPERATORS = ("LAND", "LOR", "LXOR", "MINLOC", "MAXLOC")
COMPOSED_COLLECTIVES = ("gatherv", "scatterv")
"""Operations that no backend has. `windlass.compat.collectives` composes them from others on every backend but shm."""
NATIVE, STAGED, COMPOSED, ABSENT = "native", "staged", "composed", "-"
_COLUMNS = (("gloo", "CPU"), ("gloo", "GPU"), ("nccl", "GPU"), ("mpi", "CPU"), ("mpi", "GPU"), ("shm", "CPU"))
_CPU_ONLY = {"gloo": ("send", "recv", "recv (any source)", "monitored_barrier", *COMPOSED_COLLECTIVES)}
_MPI_SECONDS = 30
_CUDA_SWITCHES = ("MPICH_GPU_SUPPORT_ENABLED", "MPIR_CVAR_ENABLE_GPU", "MV2_USE_CUDA", "I_MPI_OFFLOAD")


def backend_availability() -> dict[str, dict[str, Any]]:
    """Return the availability of each backend here: its version (or None), and the reason if it is unavailable.

    The keys are `available`, `version`, `why`, and for an available mpi `cuda_aware`.
    """
    import torch
    import torch.distributed as dist

    found = {name: _unavailable("torch.distributed is not part of this torch") for name in BACKEND_NAMES}
    if dist.is_available():
        found["gloo"] = _availability_if_built(dist.is_gloo_available())
        found["mpi"] = dict(_mpi_availability())
        found["ucc"] = _availability_if_built(dist.is_ucc_available())
        found["nccl"] = _availability_if_built(dist.is_nccl_available())
        if dist.is_nccl_available():
            found["nccl"]["version"] = ".".join(map(str, torch.cuda.nccl.version()))
            if not torch.cuda.is_available():
                found["nccl"] |= {"available": False, "why": "there is no GPU"}
        found["shm"] = _shm_availability()
    return found


def _availability_if_built(there: bool) -> dict[str, Any]:
    if not there:
        return _unavailable("this torch was built without it")
    return {"available": True, "version": None, "why": None}


def _unavailable(why: str) -> dict[str, Any]:
    return {"available": False, "version": None, "why": why}


def _shm_availability() -> dict[str, Any]:
    """Report shm as available if this process can create memory that other processes of the host can map."""
    if not hasattr(os, "memfd_create"):
        return _unavailable("this system has no anonymous memory files")
    try:
        os.close(os.memfd_create("windlass-env"))
    except OSError as error:
        return _unavailable(f"anonymous memory files are refused here ({error})")
    return {"available": True, "version": None, "why": None}


@cache  # the MPI of a machine does not change, and a process takes seconds to start
def _mpi_availability() -> dict[str, Any]:
    """Report mpi as available if a new process can initialize MPI: a broken MPI may end the process, or hang."""
    program = (
        "import json; from mpi4py import MPI; from windlass.observe.environment import backend_support as own; "
        "print(json.dumps([own.mpi_library_name(MPI), own.is_cuda_aware(MPI)]))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=_MPI_SECONDS, check=True
        )
        name, cuda_aware = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return _unavailable(f"MPI did not start within {_MPI_SECONDS} s")
    except subprocess.CalledProcessError as error:
        return _unavailable(f"{(error.stderr.strip().splitlines() or ['MPI failed'])[-1]}")
    return {"available": True, "version": name, "why": None, "cuda_aware": cuda_aware}


def mpi_library_name(mpi: Any) -> str:
    """Return the name and version of the MPI library, in one line."""
    text = str(mpi.Get_library_version()).replace("\x00", "").strip().splitlines()[0]
    return " ".join(text.split(",")[0].split())


def is_cuda_aware(mpi: Any) -> bool:
    """Return True if the initialized MPI accepts GPU memory: it reports this, or an environment variable enables it."""
    library = ctypes.CDLL(mpi.__file__)
    try:
        answer = bool(library.MPIX_Query_cuda_support())
    except AttributeError:  # not every MPI has this extension
        answer = False
    return answer or any(os.environ.get(name, "").strip() in ("1", "true", "on") for name in _CUDA_SWITCHES)


def support_by_device(available: dict[str, dict[str, Any]], *, gpu: bool) -> dict[str, dict[str, str]]:
    """Return, for each operation, the kind of support by backend and device, such as `{"gloo CPU": "native"}`.

    `native`: the backend has the operation; `staged`: it runs through host memory; `composed`:
    `windlass.compat.collectives` composes it from operations of the backend; `-`: it is not supported, or the backend
    is not available here.

    Args:
        available: result of `backend_availability`.
        gpu: the machine has a GPU.
    """
    rows: dict[str, dict[str, str]] = {}
    columns = [(name, device) for name, device in _COLUMNS if gpu or device == "CPU"]
    tables = ((collective_support(), COMPOSED_COLLECTIVES), (operator_support(), COMPOSED_OPERATORS))
    for table, composed in tables:
        for row, have in table.items():
            rows[row] = {f"{name} {device}": _way(available, name, device, row, have[name]) for name, device in columns}
        for row in composed:
            rows[row] = {f"{name} {device}": _way(available, name, device, row, False) for name, device in columns}
    return rows


def _way(available: dict[str, dict[str, Any]], name: str, device: str, row: str, native: bool) -> str:
    if not available[name]["available"] or (device == "GPU" and row in _CPU_ONLY.get(name, ())):
        return ABSENT
    if name == "shm" or (row == "recv (any source)" and not native):
        return NATIVE if native else ABSENT
    if not native:
        return COMPOSED
    return STAGED if name == "mpi" and device == "GPU" and not available[name]["cuda_aware"] else NATIVE


def collective_support() -> dict[str, dict[str, bool]]:
    """Return, by collective, whether each backend supports it."""
    return _support_table(COLLECTIVES)


def operator_support() -> dict[str, dict[str, bool]]:
    """Return, by reduction operator, whether each backend supports it; gloo supports AVG from torch 2.13 on."""
    import torch

    found = _support_table(OPERATORS)
    found["AVG"]["gloo"] &= tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
    return found


def _support_table(have: dict[str, tuple[str, ...]]) -> dict[str, dict[str, bool]]:
    return {row: {name: name in those for name in BACKEND_NAMES} for row, those in have.items()}
