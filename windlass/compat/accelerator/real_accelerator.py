"""Choice of this process's accelerator: set by the script, else named by `DS_ACCELERATOR`, else CUDA if available."""

from __future__ import annotations

import os

import torch

from windlass.base.errors import ConfigError
from windlass.compat.accelerator.abstract_accelerator import DeepSpeedAccelerator
from windlass.compat.accelerator.cpu_accelerator import CPU_Accelerator
from windlass.compat.accelerator.cuda_accelerator import CUDA_Accelerator

ACCELERATOR_VARIABLE = "DS_ACCELERATOR"
SUPPORTED_ACCELERATOR_LIST = ["cuda", "cpu"]
_chosen: DeepSpeedAccelerator | None = None


def get_accelerator() -> DeepSpeedAccelerator:
    """Return the accelerator of this process, the same object at every call.

    Raises:
        ConfigError: `DS_ACCELERATOR` names an accelerator that windlass does not support.
    """
    global _chosen
    if _chosen is None:
        named = os.environ.get(ACCELERATOR_VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")
        if named not in SUPPORTED_ACCELERATOR_LIST:
            raise ConfigError(
                f"{ACCELERATOR_VARIABLE} is {named!r}, but windlass runs on "
                f"{' and '.join(SUPPORTED_ACCELERATOR_LIST)}: set one of these, or unset the variable"
            )
        _chosen = CUDA_Accelerator() if named == "cuda" else CPU_Accelerator()
    return _chosen


def set_accelerator(accel_obj: DeepSpeedAccelerator | None) -> None:
    """Set the object that `get_accelerator` returns. None: the next call chooses again.

    Raises:
        TypeError: the object is not a `DeepSpeedAccelerator`.
    """
    global _chosen
    if accel_obj is not None and not isinstance(accel_obj, DeepSpeedAccelerator):
        raise TypeError(f"accel_obj is a {type(accel_obj).__name__}; derive its class from DeepSpeedAccelerator")
    _chosen = accel_obj


def is_current_accelerator_supported() -> bool:
    """Return True if windlass supports the chosen accelerator."""
    return get_accelerator()._name in SUPPORTED_ACCELERATOR_LIST
