"""Module `deepspeed.checkpointing`: `windlass.checkpointing` under DeepSpeed's names and with its globals.

[Note: live names] Scripts read and set globals such as `deepspeed.checkpointing.PARTITION_ACTIVATIONS`. A name in
`LIVE` is looked up at every access, and assigning to it changes the option.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from windlass import checkpointing
from windlass.base.errors import ConfigError
from windlass.checkpointing import get_offload_counters as get_offload_counters
from windlass.checkpointing import is_configured as is_configured
from windlass.checkpointing import manual_seed as model_parallel_cuda_manual_seed
from windlass.checkpointing import offload_saved_tensors as offload_saved_tensors
from windlass.checkpointing import reset as reset
from windlass.compat.parallel_groups import bwc_tensor_model_parallel_group
from windlass.parallel.activation_checkpoint_api import current_options, model_parallel_seed, set_options
from windlass.parallel.rng_tracker import MODEL_PARALLEL_RNG, RngTracker, rng_tracker, set_rng_state
from windlass.parallel.rng_tracker import RngTracker as CudaRNGStatesTracker

__all__ = [
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "detach_variable",
    "get_cuda_rng_tracker",
    "get_offload_counters",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "offload_saved_tensors",
    "partition_activations_in_checkpoint",
    "reset",
]

_OPTIONS = {
    "PARTITION_ACTIVATIONS": "partition_activations",
    "CONTIGUOUS_CHECKPOINTING": "contiguous_memory_optimization",
    "num_layers": "number_checkpoints",
    "CPU_CHECKPOINT": "cpu_checkpointing",
    "SYNCHRONIZE": "synchronize_checkpoint_boundary",
    "PROFILE_TIME": "profile",
}
_unit: Any = None
_MODEL_PARALLEL_RNG_TRACKER_NAME = MODEL_PARALLEL_RNG
_CUDA_RNG_STATE_TRACKER = rng_tracker


class LayersError(ConfigError, AssertionError):
    """Error: contiguous activation checkpointing has no number of layers. An AssertionError as in DeepSpeed."""


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
    **more: Any,
) -> None:
    """Configure activation checkpointing, as `windlass.checkpointing.configure` does.

    Args:
        mpu_: object whose `get_tensor_model_parallel_group()`, or an older name of it, returns the group of the ranks
            that share a tensor; None: the object of the previous call.
        deepspeed_config: a configuration; its section `activation_checkpointing` applies where an argument is None.
        more: arguments of `windlass.checkpointing.configure` that DeepSpeed lacks, such as `nvme_path`.

    Raises:
        LayersError: contiguous checkpointing without the number of layers.
        ConfigError, StorageError: see `windlass.checkpointing.configure`.
    """
    global _unit
    unit = _unit if mpu_ is None else mpu_
    try:
        checkpointing.configure(
            deepspeed_config,
            partition_activations=partition_activations,
            contiguous_memory_optimization=contiguous_checkpointing,
            number_checkpoints=num_checkpoints,
            cpu_checkpointing=checkpoint_in_cpu,
            synchronize_checkpoint_boundary=synchronize,
            profile=profile,
            **{"group": bwc_tensor_model_parallel_group(unit), **more},
        )
    except ConfigError as error:
        if "add number_checkpoints" not in str(error):
            raise
        raise LayersError(f"{error}, the number of layers that are checkpointed (num_checkpoints=...)") from None
    _unit = unit


def checkpoint(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `windlass.checkpointing.checkpoint`.

    A tuple or list of one result is returned as that result, any other list as a tuple.
    """
    outputs = checkpointing.checkpoint(function, *args, **kwargs)
    if isinstance(outputs, (tuple, list)) and len(outputs) == 1:
        return outputs[0]
    return tuple(outputs) if isinstance(outputs, list) else outputs


non_reentrant_checkpoint = checkpoint


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Turn the sharding of saved inputs over the model-parallel group on or off. Other options do not change."""
    set_options(replace(current_options(), partition_activations=partition_activation))


def get_cuda_rng_tracker() -> RngTracker:
    """Return the named random generators, whose states `checkpoint` restores before a recomputation."""
    return rng_tracker


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Reseed the generator of the model-parallel group. torch's own generator keeps its state."""
    with rng_tracker.fork():
        torch.manual_seed(model_parallel_seed(seed))


def detach_variable(inputs: tuple[Any, ...], device: torch.device | str | None = None) -> tuple[Any, ...]:
    """Return `inputs` with each tensor detached, on `device` if given; `requires_grad` is kept.

    Raises:
        RuntimeError: `inputs` is not a tuple.
    """
    if not isinstance(inputs, tuple):
        raise RuntimeError(f"detach_variable takes a tuple, not {type(inputs).__name__}; pass (value,)")
    return tuple(_detached(value, device) if isinstance(value, torch.Tensor) else value for value in inputs)


def _detached(tensor: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    moved = tensor if device is None else tensor.to(device)
    return moved.detach().requires_grad_(tensor.requires_grad)


def _set_cuda_rng_state(new_state: torch.Tensor, device: int = -1) -> None:
    """Set the state of the current device's generator; `device` is ignored."""
    set_rng_state(new_state)


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
        set_options(replace(current_options(), group=bwc_tensor_model_parallel_group(unit)))
        _unit = unit


def _set_enabled(enabled: bool) -> None:
    global _unit
    if enabled != is_configured():
        set_options(current_options() if enabled else None, configured=enabled)
        _unit = _unit if enabled else None


LIVE: dict[str, Callable[[Any], None]] = {
    **{name: _setter(option) for name, option in _OPTIONS.items()},
    "mpu": _set_unit,
    "deepspeed_checkpointing_enabled": _set_enabled,
}
