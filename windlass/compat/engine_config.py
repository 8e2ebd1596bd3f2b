"""Class of `engine._config`: the configuration, plus the attribute names of DeepSpeed's `DeepSpeedConfig`."""

from __future__ import annotations

from typing import Any

from windlass.compat.config_queries import COMPUTED_ANSWERS
from windlass.config import Config


class EngineConfig(Config):
    """Configuration with DeepSpeed's names for some of its values."""

    @property
    def param_dtype(self) -> str | None:
        """Value of `data_types.param_dtype`."""
        return self.data_types.param_dtype

    @property
    def buffer_dtype(self) -> str | None:
        """Value of `data_types.buffer_dtype`."""
        return self.data_types.buffer_dtype

    @property
    def grad_accum_dtype(self) -> str | None:
        """Value of `data_types.grad_accum_dtype`."""
        return self.data_types.grad_accum_dtype

    @property
    def zero_config(self) -> Any:
        """Section `zero_optimization`."""
        return self.zero_optimization

    @property
    def zero_optimization_stage(self) -> int:
        """Value of `zero_optimization.stage`."""
        return int(self.zero_optimization.stage)

    @property
    def zero_enabled(self) -> bool:
        """True if the ZeRO stage is above 0."""
        return self.zero_optimization.stage > 0

    @property
    def float16_config(self) -> Any:
        """Section `fp16`."""
        return self.fp16

    @property
    def bfloat16_config(self) -> Any:
        """Section `bf16`."""
        return self.bf16

    @property
    def optimizer_name(self) -> str | None:
        """Value of `optimizer.type` in lower case; None without such a section."""
        return self.optimizer.type.lower() if self.optimizer is not None else None

    @property
    def optimizer_params(self) -> dict[str, Any] | None:
        """Value of `optimizer.params`; None without such a section."""
        found: dict[str, Any] | None = COMPUTED_ANSWERS["optimizer_params"](self)
        return found

    @property
    def scheduler_name(self) -> str | None:
        """Value of `scheduler.type`; None without such a section."""
        return self.scheduler.type if self.scheduler is not None else None

    @property
    def scheduler_params(self) -> dict[str, Any] | None:
        """Value of `scheduler.params`; None without such a section."""
        found: dict[str, Any] | None = COMPUTED_ANSWERS["scheduler_params"](self)
        return found


def asked(config: Config) -> EngineConfig:
    """Return the same values as an `EngineConfig`."""
    made = EngineConfig.model_construct(
        _fields_set=set(config.model_fields_set), **{name: getattr(config, name) for name in type(config).model_fields}
    )
    object.__setattr__(made, "__pydantic_private__", config.__pydantic_private__)
    return made
