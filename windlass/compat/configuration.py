"""`DeepSpeedConfig`: a configuration that was read, asked by the names that scripts use."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from windlass.compat.accessors import ANSWERS
from windlass.compat.monitors import get_monitor_config
from windlass.compat.tolerance import tolerated
from windlass.config import load
from windlass.config.source import read


class DeepSpeedConfig:
    """A configuration and the batch that it makes on as many ranks as there are.

    Args:
        config: dict, path or base64.
        mpu: asked for the number of data-parallel ranks, if it is given.
        mesh_device: accepted; without effect.

    Raises:
        ConfigError: it cannot be read, or the batch does not fit the number of ranks.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self._param_dict: dict[str, Any] = config if isinstance(config, dict) else read(config).data
        self.config = load(tolerated(config))
        self.world_size = mpu.get_data_parallel_world_size() if mpu is not None else _world()
        batch = self.config.resolve_batch(self.world_size)
        self.train_batch_size = batch.train
        self.train_micro_batch_size_per_gpu = batch.micro
        self.gradient_accumulation_steps = batch.accumulation
        self.zero_config = self.config.zero_optimization
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_config.stage > 0
        self.float16_config, self.bfloat16_config = self.config.fp16, self.config.bf16
        self.optimizer_name = self.config.optimizer.type.lower() if self.config.optimizer is not None else None
        self.optimizer_params = ANSWERS["optimizer_params"](self.config)
        self.scheduler_name = self.config.scheduler.type if self.config.scheduler is not None else None
        self.scheduler_params = ANSWERS["scheduler_params"](self.config)
        self.monitor_config = get_monitor_config(config)

    def __getattr__(self, name: str) -> Any:
        if name == "config":
            raise AttributeError(name)
        return getattr(self.config, name)

    def print(self, name: str) -> None:
        """Print every value that is not the default."""
        print(f"{name}: {self.config.model_dump_json(indent=2, exclude_defaults=True)}")

    def print_user_config(self) -> None:
        """Print what the caller gave."""
        print(self._param_dict)


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
