"""Class `DeepSpeedConfig`: a loaded configuration, with the attributes that scripts read."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from windlass.base.errors import ConfigError
from windlass.compat.config_getters import ValueConfigError, get_gradient_allreduce_op
from windlass.compat.config_queries import COMPUTED_ANSWERS
from windlass.compat.monitor_writers import get_monitor_config
from windlass.compat.tolerated_keys import resolve_tolerated_keys
from windlass.config import Config, batch_sizes, load_config
from windlass.config.axis_sizes import axes_from_data_loading_size
from windlass.config.config_source import read_source
from windlass.parallel.script_ranks import known_sizes


class BatchError(ConfigError, AssertionError):
    """Error for inconsistent batch sizes. DeepSpeed raises AssertionError here."""


class DeepSpeedConfig:
    """Configuration, with the batch sizes that it yields for the current number of ranks.

    Args:
        config: dictionary, path of a JSON file, or JSON as base64 text.
        mpu: optional object whose parallel sizes give the number of ranks that share a sample.
        mesh_device: optional torch device mesh with a dimension `data_parallel`, used for the same purpose.

    Attributes:
        world_size: number of data-loading ranks: ranks that read different samples.

    Raises:
        ConfigError: the configuration is unreadable, or the batch does not fit the number of ranks.
        ValueConfigError: `gradient_allreduce_op` is not mean or sum, or it is sum with an unsupported feature.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self._param_dict: dict[str, Any] = config if isinstance(config, dict) else read_source(config).data
        adds_up = get_gradient_allreduce_op(self._param_dict) == "sum"
        self.config = load_config(resolve_tolerated_keys(config))
        if adds_up:
            _check_sum(self.config)
        axes = self.config.axes(_world_size(), other_sizes=_axis_sizes_of(mpu, mesh_device))
        # An mpu may have only the data-parallel size; the other axes then follow from that size.
        if axes.data_loading_size == axes.world_size and hasattr(mpu, "get_data_parallel_world_size"):
            axes = axes_from_data_loading_size(self.config, int(mpu.get_data_parallel_world_size()))
        self.world_size = axes.data_loading_size
        self._axes = axes
        batch = self.config.resolve_batch(axes.world_size, axes=axes)
        self.train_batch_size = batch.train
        self.train_micro_batch_size_per_gpu = batch.micro
        self.gradient_accumulation_steps = batch.accumulation
        self.zero_config = self.config.zero_optimization
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_config.stage > 0
        self.float16_config, self.bfloat16_config = self.config.fp16, self.config.bf16
        self.optimizer_name = self.config.optimizer.type.lower() if self.config.optimizer is not None else None
        self.optimizer_params = COMPUTED_ANSWERS["optimizer_params"](self.config)
        self.scheduler_name = self.config.scheduler.type if self.config.scheduler is not None else None
        self.scheduler_params = COMPUTED_ANSWERS["scheduler_params"](self.config)
        self.monitor_config = get_monitor_config(config)

    def __getattr__(self, name: str) -> Any:
        if name == "config":
            raise AttributeError(name)
        return getattr(self.config, name)

    def _configure_train_batch_size(self) -> None:
        """Compute the batch sizes that are None from those that are not.

        Raises:
            BatchError: the batch sizes are inconsistent, or too few are given.
        """
        given = {key: getattr(self, key) for key in batch_sizes.KEYS}
        try:
            batch = self.config.model_copy(update=given).resolve_batch(self._axes.world_size, axes=self._axes)
        except ConfigError as error:
            raise BatchError(str(error)) from None
        self.train_batch_size = batch.train
        self.train_micro_batch_size_per_gpu = batch.micro
        self.gradient_accumulation_steps = batch.accumulation

    def print(self, name: str) -> None:
        """Print every value that differs from its default."""
        print(f"{name}: {self.config.model_dump_json(indent=2, exclude_defaults=True)}")

    def print_user_config(self) -> None:
        """Print the configuration that the caller passed."""
        print(self._param_dict)


def _check_sum(config: Config) -> None:
    """Raise ValueConfigError for `gradient_allreduce_op: sum` with a feature for which DeepSpeed refuses the sum.

    `windlass.initialize` accepts the sum at stage 3 too.
    """
    refused = {
        "ZeRO stage 3": ("gradient_allreduce_op", config.zero_optimization.stage == 3),
        "ZenFlow": ("zero_optimization.zenflow", config.zero_optimization.zenflow is not None),
        "DeepCompile": ("compile.deepcompile", config.compile.deepcompile),
    }
    for name, (key, asked) in refused.items():
        if asked:
            raise ValueConfigError(f"gradient_allreduce_op 'sum' is not supported with {name}; remove {key}")


def _axis_sizes_of(mpu: Any, mesh_device: Any) -> dict[str, dict[str, int]]:
    """Return the axis sizes given by `mpu` and by `mesh_device`."""
    sizes = {"mpu": known_sizes(mpu)} if mpu is not None else {}
    if mesh_device is not None:
        sizes["mesh_device"] = {"sp": mesh_device.size() // mesh_device["data_parallel"].size()}
    return sizes


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
