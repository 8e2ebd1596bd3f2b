"""Versions of the software (windlass, Python, torch, packages), and the environment variables that affect a run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    "accelerate",
    "peft",
    "trl",
    "lightning",
    "deepspeed",
)
_VARIABLE_PREFIXES = ("WINDLASS_", "NCCL_", "GLOO_", "TORCH_", "UCC_", "CUDA_", "PYTORCH_")
_VARIABLE_NAMES = (
    "OMP_NUM_THREADS",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "DS_ACCELERATOR",
)


def windlass_facts() -> dict[str, Any]:
    """Return windlass' version and its folder."""
    return {"version": windlass.__version__, "path": str(Path(windlass.__file__).parent)}


def python_facts() -> dict[str, Any]:
    """Return Python's version, implementation, and executable."""
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
    }


def torch_facts() -> dict[str, Any]:
    """Return torch's version, path and threads, and the versions of CUDA, HIP and cuDNN (None: built without)."""
    import torch

    return {
        "version": torch.__version__,
        "path": str(Path(torch.__file__).parent),
        "threads": torch.get_num_threads(),
        "distributed": torch.distributed.is_available(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
    }


def package_versions() -> dict[str, str | None]:
    """Return the versions of packages that windlass works with; None: not installed."""
    return {name: installed_version(name) for name in _PACKAGES}


def installed_version(package: str) -> str | None:
    """Return the version of a package from its metadata, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def relevant_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that affect a run, by name."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if name.startswith(_VARIABLE_PREFIXES) or name in _VARIABLE_NAMES
    }
