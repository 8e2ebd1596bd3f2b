"""`deepspeed.runtime.torch_autocast`: the dtype that a parameter's gradient travels in.

DeepSpeed marks parameters of some modules under `torch_autocast`. windlass marks none: gradients travel in
`communication_data_type`. A mark that a script sets itself is read back.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

LOWER_PRECISION_SAFE_MODULES = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d]
PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Return the names of `LOWER_PRECISION_SAFE_MODULES`."""
    return [f"{cls.__module__}.{cls.__name__}" for cls in LOWER_PRECISION_SAFE_MODULES]


def has_comm_dtype(param: nn.Parameter) -> bool:
    """Return whether a parameter is marked."""
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: nn.Parameter) -> torch.dtype:
    """Return the mark of a parameter, or its own dtype."""
    found: torch.dtype = getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)
    return found


def get_all_comm_dtypes(params: Iterable[nn.Parameter]) -> set[torch.dtype]:
    """Return the marks of several parameters."""
    return {get_comm_dtype(param) for param in params}


def sort_dtypes(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """Return dtypes in the order of their names."""
    return sorted(dtypes, key=str)
