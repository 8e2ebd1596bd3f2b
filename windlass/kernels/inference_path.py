"""Choice of the instruction set that the kernels of inference use."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch

from windlass.base.errors import ConfigError, ModelError
from windlass.base.native_memory import native_access_problem
from windlass.kernels.kernel_dispatch import REFERENCE_PATH, check_path_name, why_native_is_missing

_ENVIRONMENT_VARIABLE = "WINDLASS_KERNELS"


@dataclass(frozen=True)
class InferencePath:
    """Implementation of the kernels of inference.

    Attributes:
        name: an instruction set ("AVX-512-BF16", "AVX-512-VNNI", "AVX-512", "AVX-VNNI", "AVX2", "NEON", "baseline"),
            or "reference".
        module: the native module, or None for the reference.
        number: number by which the native module identifies the instruction set.
    """

    name: str
    module: ModuleType | None = None
    number: int = 0


def list_inference_paths() -> list[str]:
    """Return every path that can run here, the best first, the reference last."""
    module = _native_module()
    return [*(module.instruction_sets() if module is not None else ()), REFERENCE_PATH]


def get_inference_path(name: str | None = None) -> InferencePath:
    """Return the path `name`; for None, the path of `WINDLASS_KERNELS`, or the best path if the variable is not set.

    "AVX-512" in the environment variable stands for the best set of that family: the kernels of the optimizers read the
    same variable, and have only that name.

    Raises:
        ConfigError: the path is not available here.
    """
    if name is None:
        return _resolve_variable(os.environ.get(_ENVIRONMENT_VARIABLE, ""))
    return _find_path(name)


def tensor_address(name: str, tensor: torch.Tensor) -> int:
    """Return the address of a contiguous CPU tensor's first element.

    Raises:
        ModelError: the tensor is not contiguous, or not plain CPU memory. The message begins with "the {name}".
    """
    is_plain = (
        tensor.layout == torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and (tensor.storage_offset() + tensor.numel()) * tensor.element_size() <= tensor.untyped_storage().nbytes()
    )
    if not is_plain:  # the full check takes four times as long, too long for every operation of a step
        problem = native_access_problem(tensor)
        if problem:
            raise ModelError(f"the {name} of shape {tuple(tensor.shape)} {problem}")
    return tensor.data_ptr()


@lru_cache(maxsize=8)
def _resolve_variable(wanted: str) -> InferencePath:
    names = list_inference_paths()
    if not wanted:
        return _find_path(names[0])
    found = next((name for name in names if name.lower() == wanted.lower()), None)
    if found is None:
        raise ConfigError(
            f"{_ENVIRONMENT_VARIABLE} is {wanted!r}; on this machine it can be {', '.join(names)}, or unset"
        )
    family = next(name for name in names if name.startswith(found))
    return _find_path(family)


@lru_cache(maxsize=8)
def _find_path(name: str) -> InferencePath:
    names = list_inference_paths()
    check_path_name(name, names, why_native_is_missing())
    if name == REFERENCE_PATH:
        return InferencePath(name)
    return InferencePath(name, _native_module(), names.index(name))


@lru_cache(maxsize=1)
def _native_module() -> ModuleType | None:
    try:
        return importlib.import_module("windlass.kernels._inference")
    except ImportError:  # not logged here: the optimizers' kernels, built together with this module, log the reason
        return None
