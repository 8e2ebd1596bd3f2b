"""Backends that are available here, and the collectives that each backend supports natively.

The table describes torch 2.10 and newer. A test on two ranks checks the column of gloo; the columns of nccl, mpi and
ucc follow torch's sources (ProcessGroupNCCL, ProcessGroupMPI, ProcessGroupUCC). shm is windlass' own transport for CPU
ranks of one host; it has only the collectives that training uses.
"""

from __future__ import annotations

import os
from typing import Any

BACKEND_NAMES = ("gloo", "nccl", "mpi", "ucc", "shm")
TENSOR_DEVICES = {"gloo": "CPU, GPU", "nccl": "GPU", "mpi": "CPU", "ucc": "CPU, GPU", "shm": "CPU"}
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
    "AVG": ("gloo", "nccl", "ucc"),
    "PRODUCT": _ALL,
    "MIN": _ALL,
    "MAX": _ALL,
    "BAND": ("gloo", "ucc"),
    "BOR": ("gloo", "ucc"),
    "BXOR": ("gloo", "ucc"),
    "PREMUL_SUM": ("nccl",),
}
"""Backends that reduce with each operator."""


def backend_availability() -> dict[str, dict[str, Any]]:
    """Return, for each backend, whether it can be used here, its version if it has one, and the reason if it cannot."""
    import torch
    import torch.distributed as dist

    found = {name: _unavailable("torch.distributed is not part of this torch") for name in BACKEND_NAMES}
    if dist.is_available():
        found["gloo"] = _availability_if_built(dist.is_gloo_available())
        found["mpi"] = _availability_if_built(dist.is_mpi_available())
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


def collective_support() -> dict[str, dict[str, bool]]:
    """Return, by collective, whether each backend supports it."""
    return _support_table(COLLECTIVES)


def operator_support() -> dict[str, dict[str, bool]]:
    """Return, by reduction operator, whether each backend supports it. gloo's AVG counts from torch 2.13 on."""
    import torch

    found = _support_table(OPERATORS)
    found["AVG"]["gloo"] &= tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
    return found


def _support_table(have: dict[str, tuple[str, ...]]) -> dict[str, dict[str, bool]]:
    return {row: {name: name in those for name in BACKEND_NAMES} for row, those in have.items()}
