"""Module `deepspeed.runtime.torch_autocast`: dtype in which a parameter's gradient is communicated.

Under `torch_autocast`, DeepSpeed sets the attribute `comm_dtype` on parameters of some modules. windlass sets none:
gradients are communicated in `communication_data_type`. An attribute set by the script is returned as set.
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
    """Return True if a parameter has the attribute `comm_dtype`."""
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: nn.Parameter) -> torch.dtype:
    """Return a parameter's `comm_dtype`, or its own dtype if it has none."""
    found: torch.dtype = getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)
    return found


def get_all_comm_dtypes(params: Iterable[nn.Parameter]) -> set[torch.dtype]:
    """Return the set of communication dtypes of several parameters."""
    return {get_comm_dtype(param) for param in params}


def sort_dtypes(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """Return dtypes sorted by name."""
    return sorted(dtypes, key=str)
