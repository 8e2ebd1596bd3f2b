"""Which device this process has: what a script set, else what `DS_ACCELERATOR` names, else CUDA where it is there."""

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
    """The device of this process, the same object at every call.

    Raises:
        ConfigError: `DS_ACCELERATOR` names one that windlass does not run on.
    """
    global _chosen
    if _chosen is None:
        named = os.environ.get(ACCELERATOR_VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")
        if named not in SUPPORTED_ACCELERATOR_LIST:
            raise ConfigError(
                f"{ACCELERATOR_VARIABLE} is {named!r}; windlass runs on {' and '.join(SUPPORTED_ACCELERATOR_LIST)}"
            )
        _chosen = CUDA_Accelerator() if named == "cuda" else CPU_Accelerator()
    return _chosen


def set_accelerator(accel_obj: DeepSpeedAccelerator | None) -> None:
    """Answer with this one from now on; None: choose again.

    Raises:
        TypeError: it is no `DeepSpeedAccelerator`.
    """
    global _chosen
    if accel_obj is not None and not isinstance(accel_obj, DeepSpeedAccelerator):
        raise TypeError(f"{type(accel_obj).__name__} is no DeepSpeedAccelerator: derive it from that class")
    _chosen = accel_obj


def is_current_accelerator_supported() -> bool:
    """Whether windlass runs on the device that was chosen."""
    return get_accelerator()._name in SUPPORTED_ACCELERATOR_LIST
