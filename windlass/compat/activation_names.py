"""Module `deepspeed.checkpointing`: `windlass.checkpointing`, plus its options under the names of DeepSpeed's globals.

[Note: live names] Scripts read and set globals such as `deepspeed.checkpointing.PARTITION_ACTIVATIONS`. A name in
`LIVE` is looked up at every access, and assigning to it changes the option.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from windlass import checkpointing
from windlass.base.errors import ConfigError
from windlass.checkpointing import checkpoint as checkpoint
from windlass.checkpointing import get_cuda_rng_tracker as get_cuda_rng_tracker
from windlass.checkpointing import get_offload_counters as get_offload_counters
from windlass.checkpointing import is_configured as is_configured
from windlass.checkpointing import model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed
from windlass.checkpointing import non_reentrant_checkpoint as non_reentrant_checkpoint
from windlass.checkpointing import offload_saved_tensors as offload_saved_tensors
from windlass.checkpointing import partition_activations_in_checkpoint as partition_activations_in_checkpoint
from windlass.checkpointing import reset as reset
from windlass.parallel.activation_checkpoint_api import current_options, set_options
from windlass.parallel.sharded_activation_store import model_parallel_group

__all__ = [*checkpointing.__all__]

_OPTIONS = {
    "PARTITION_ACTIVATIONS": "partition_activations",
    "CONTIGUOUS_CHECKPOINTING": "contiguous_memory_optimization",
    "num_layers": "number_checkpoints",
    "CPU_CHECKPOINT": "cpu_checkpointing",
    "SYNCHRONIZE": "synchronize_checkpoint_boundary",
    "PROFILE_TIME": "profile",
}
_unit: Any = None


class LayersError(ConfigError, AssertionError):
    """Contiguous activation checkpointing without a number of layers. DeepSpeed raises AssertionError here."""


def configure(mpu_: Any = None, deepspeed_config: Any = None, *args: Any, **kwargs: Any) -> None:
    """Configure activation checkpointing, as `windlass.checkpointing.configure` does.

    Raises:
        LayersError: contiguous checkpointing without the number of layers.
        ConfigError: see `windlass.checkpointing.configure`.
    """
    global _unit
    try:
        checkpointing.configure(mpu_, deepspeed_config, *args, **kwargs)
    except ConfigError as error:
        if "add number_checkpoints" not in str(error):
            raise
        raise LayersError(f"{error}, the number of layers that are checkpointed (num_checkpoints=...)") from None
    _unit = mpu_


def __getattr__(name: str) -> Any:
    if name in _OPTIONS:
        return getattr(current_options(), _OPTIONS[name])
    if name == "deepspeed_checkpointing_enabled":
        return is_configured()
    if name == "mpu":
        return _unit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _setter(option: str) -> Callable[[Any], None]:
    def set_one(value: Any) -> None:
        if getattr(current_options(), option) != value:
            set_options(replace(current_options(), **{option: value}))

    return set_one


def _set_unit(unit: Any) -> None:
    global _unit
    if unit is not _unit:
        set_options(replace(current_options(), group=model_parallel_group(unit)))
        _unit = unit


def _set_enabled(enabled: bool) -> None:
    if enabled != is_configured():
        set_options(current_options() if enabled else None)


LIVE: dict[str, Callable[[Any], None]] = {
    **{name: _setter(option) for name, option in _OPTIONS.items()},
    "mpu": _set_unit,
    "deepspeed_checkpointing_enabled": _set_enabled,
}
