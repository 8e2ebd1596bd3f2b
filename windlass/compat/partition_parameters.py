"""Names of `deepspeed.runtime.zero.partition_parameters` that clients read or replace."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist

from windlass import zero
from windlass.base.dtypes import parse_dtype
from windlass.compat import parameter_attributes
from windlass.compat.accelerator import get_accelerator
from windlass.compat.mpu_sizes import MODEL_AXES, spans_ranks
from windlass.compat.strict_mode import is_strict
from windlass.compat.tolerated_keys import resolve_tolerated_keys
from windlass.compat.zero_linear import InsertPostInitMethodToModuleSubClasses, replace_linear
from windlass.config import Config, load_config

_orig_torch_arange = torch.arange
_orig_torch_empty = torch.empty
_orig_torch_zeros = torch.zeros
_orig_torch_ones = torch.ones
_orig_torch_full = torch.full
_orig_torch_tensor = torch.tensor
_orig_torch_eye = torch.eye
_orig_torch_randn = torch.randn

zero_init_context: list[Any] = []

partitioned_param_data_shape = [0]
"""Shape of a sharded parameter's data in DeepSpeed, and in strict mode. Otherwise the data keeps its full shape."""


class MultipleAllGatherHandles:
    """Handle that combines the handles of several all-gathers."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self.handles = handles

    def wait(self, handle_dependency: bool = True) -> None:
        """Wait for all handles."""
        for handle in self.handles:
            handle.wait(handle_dependency=handle_dependency)


def print_rank_0(message: Any, debug: bool = False, force: bool = False) -> None:
    """Print on rank 0 if `debug` or `force` is set."""
    if (debug or force) and (not dist.is_initialized() or dist.get_rank() == 0):
        print(message)


def _contradicting_single_rank_pg_error(
    dp_world_size: int, explicit_process_group: Any, env: Mapping[str, str | None] | None = None
) -> str | None:
    """Return an error message if the launcher started several ranks but the default group has one; None otherwise.

    For scripts that call DeepSpeed's check: windlass's `Init` does not call this function.
    """
    given = (os.environ if env is None else env).get("WORLD_SIZE")
    world = int(given) if given is not None and given.strip().isdecimal() else 1
    if explicit_process_group is not None or dp_world_size != 1 or world <= 1:
        return None
    return (
        f"zero.Init: the launcher sets WORLD_SIZE={world} but the process group has 1 rank, so nothing would be "
        "sharded; call deepspeed.init_distributed() first, or pass data_parallel_group"
    )


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return `fn`. DeepSpeed's `Init` wraps torch's constructors with this function; windlass's `Init` does not.

    A function that a client assigns to this name is therefore never called.
    """
    return fn


_INIT_SIGNATURE = signature(zero.Init.__init__)


class Init(InsertPostInitMethodToModuleSubClasses, zero.Init):
    """Context `windlass.zero.Init` that accepts every configuration that `deepspeed.initialize` accepts.

    Parameters are constructed in the configuration's 16-bit dtype unless `dtype` is passed. In strict mode without a
    configuration and a module, the dtype is fp16, or bf16 if the device does not support fp16. Parameters have
    DeepSpeed's attributes, on a single rank too. An `mpu` is accepted if its ranks all hold the same parameters;
    `sequence_data_parallel_group` means `data_parallel_group`. With `memory_efficient_linear: true` in the
    configuration (without a configuration: `mem_efficient_linear=True`), entering the context replaces torch's linear
    function; in strict mode, true is the default of both.
    """

    shards_alone = shards_nested = True
    provides_stubs = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        parameter_attributes.install_parameter_attributes()
        given = _INIT_SIGNATURE.bind(self, *args, **kwargs).arguments
        if given.get("enabled", True):
            if not spans_ranks(given.get("mpu"), MODEL_AXES):
                given.pop("mpu", None)
            # Sequence-parallel ranks hold the same parameters, so parameters are sharded over this larger group.
            if (group := given.pop("sequence_data_parallel_group", None)) is not None:
                given["data_parallel_group"] = group
            for name in ("config_dict_or_path", "config"):
                if given.get(name) is not None and not isinstance(given[name], Config):
                    given[name] = load_config(resolve_tolerated_keys(given[name]))
            config = given.get("config_dict_or_path") or given.get("config")
            if config is not None and given.get("dtype") is None and (config.bf16.enabled or config.fp16.enabled):
                given["dtype"] = parse_dtype(config.dtype_table().param_dtype)
            elif is_strict() and config is None and given.get("dtype") is None and given.get("module") is None:
                given["dtype"] = torch.float16 if get_accelerator().is_fp16_supported() else torch.bfloat16
            self._replaces_linear = (
                requests_linear(config) if config is not None else given.get("mem_efficient_linear", is_strict())
            )
        super().__init__(**{name: value for name, value in given.items() if name != "self"})

    def __enter__(self) -> Init:
        if self.enabled and self._replaces_linear:
            replace_linear()
        super().__enter__()
        return self


def requests_linear(config: Config) -> bool:
    """Return True if a configuration sets `memory_efficient_linear` to true, or lacks the key in strict mode."""
    section = config.zero_optimization
    written = "memory_efficient_linear" in section.model_fields_set or is_strict()
    return written and section.memory_efficient_linear


Init.__init__.__signature__ = _INIT_SIGNATURE  # type: ignore[attr-defined]


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Register that `module` uses a parameter of another module.

    windlass detects such uses by itself; the entry only appears in `ds_external_parameters`.

    Raises:
        RuntimeError: the argument is not a parameter.
    """
    if not isinstance(parameter, torch.nn.Parameter):
        raise RuntimeError(f"register_external_parameter takes a Parameter, not a {type(parameter).__name__}")
    parameter_attributes.install_parameter_attributes()
    parameter_attributes.external_parameters_of(module)[f"external_{id(parameter)}"] = parameter


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Undo `register_external_parameter`.

    Raises:
        RuntimeError: the parameter is not registered.
    """
    known = parameter_attributes.external_parameters_of(module)
    name = next((name for name, other in known.items() if other is parameter), None)
    if name is None:
        raise RuntimeError(
            "unregister_external_parameter: the parameter is not registered with this module; delete the call"
        )
    del known[name]


def is_zero_param(parameter: Any) -> bool:
    """Return True if a parameter is managed by stage 3."""
    return isinstance(parameter, torch.nn.Parameter) and parameter_attributes.is_stage_3_parameter(parameter)
