"""Which software is here: windlass, Python, torch, packages, and the variables that steer them."""

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
    """Its version and where it lies."""
    return {"version": windlass.__version__, "path": str(Path(windlass.__file__).parent)}


def python_facts() -> dict[str, Any]:
    """Version, implementation, and the file that runs."""
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
    }


def torch_facts() -> dict[str, Any]:
    """Version, place and threads, and what it was built with (None: without)."""
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
    """Versions of what windlass works with; None: not installed."""
    return {name: installed_version(name) for name in _PACKAGES}


def installed_version(package: str) -> str | None:
    """By its metadata, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def relevant_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables that steer a run, by name."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if name.startswith(_VARIABLE_PREFIXES) or name in _VARIABLE_NAMES
    }
