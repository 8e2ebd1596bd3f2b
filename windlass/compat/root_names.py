"""Names at the root of `deepspeed`: modules of Python, torch and `packaging`, the version, and constants."""

from __future__ import annotations

import argparse as argparse
import json as json
import os as os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch as torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from windlass.compat.stand_in_version import VERSION

DeepSpeedOptimizerCallable = Callable[[Any], Optimizer]
DeepSpeedSchedulerCallable = Callable[[Optimizer], LRScheduler]

version = VERSION.partition("+")[0]
__version_major__, __version_minor__, __version_patch__ = map(int, version.split("."))
git_hash = git_branch = "windlass"
dist = None

KV, MLA_KV, MLA_Q, QUERY, NOT_HEAD_BLOCKED = "kv", "mla_kv", "mla_q", "query", "not-head-blocked"


def get_annotations(obj: Any) -> Mapping[str, Any]:
    """Return the annotations of a class, function or module, or of an object's class."""
    found: Mapping[str, Any] = getattr(obj, "__annotations__", {})
    return found


def get_annotations_from_namespace(namespace: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the annotations in the namespace of a class under construction."""
    found: Mapping[str, Any] = namespace.get("__annotations__", {})
    return found


def __getattr__(name: str) -> Any:
    if name == "pkg_version":  # imported on access only: windlass does not need `packaging`
        return import_module("packaging.version")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
