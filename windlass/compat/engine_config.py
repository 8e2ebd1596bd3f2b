"""Class of `engine._config`: the configuration, plus the attribute names of DeepSpeed's `DeepSpeedConfig`."""

from __future__ import annotations

from typing import Any

from pydantic import PrivateAttr

from windlass.compat.config_queries import COMPUTED_ANSWERS
from windlass.compat.config_sections import STAGE_3_KEYS, stage_3_property
from windlass.compat.not_built import NotBuiltError
from windlass.config import BatchSizes, Config, batch_sizes
from windlass.config.zero_section import ZeroConfig


class EngineZeroConfig(ZeroConfig):
    """Section `zero_optimization` that also has DeepSpeed's names of stage-3 keys.

    Assigning a value raises, except `gather_16bit_weights_on_model_save`, which scripts set before they save.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name.removeprefix("stage3_") == "gather_16bit_weights_on_model_save":
            self.__dict__["stage3_gather_16bit_weights_on_model_save"] = bool(value)
        else:
            raise NotBuiltError(
                f"engine._config.zero_config.{name} = {value!r}: the engine was built with the former value; write it "
                "in the configuration"
            )


for _name in STAGE_3_KEYS:
    setattr(EngineZeroConfig, _name, stage_3_property(_name))


class EngineConfig(Config):
    """Configuration with DeepSpeed's names for some of its values.

    The batch sizes are those in use. Assigning a value raises, except `zero_enabled`; see also `EngineZeroConfig`.
    """

    _zero_enabled: bool = PrivateAttr()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "zero_enabled":
            self._zero_enabled = bool(value)
        elif name.startswith("_"):
            super().__setattr__(name, value)
        else:
            way = _SETTERS.get(name, "write it in the configuration")
            raise NotBuiltError(f"engine._config.{name} = {value!r}: the engine was built with the former value; {way}")

    def record_batch(self, batch: BatchSizes) -> None:
        """Set the three batch sizes."""
        self.__dict__.update(zip(batch_sizes.KEYS, (batch.train, batch.micro, batch.accumulation), strict=True))

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
        """True if the ZeRO stage is above 0, unless the script assigned a value.

        Scripts assign False around `load_checkpoint`, so that DeepSpeed reads no optimizer files. In windlass the value
        has no effect: only the arguments of `load_checkpoint` select the states to read.
        """
        return self._zero_enabled

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


_SETTERS = {
    batch_sizes.TRAIN: "call engine.set_train_batch_size",
    batch_sizes.MICRO: "call engine.set_train_micro_batch_size",
    batch_sizes.ACCUMULATION: "call engine.set_train_batch_size",
}


def as_engine_config(config: Config, batch: BatchSizes) -> EngineConfig:
    """Return an `EngineConfig` with the values of `config` and the batch sizes in use."""
    values = {name: getattr(config, name) for name in type(config).model_fields}
    section = config.zero_optimization
    values["zero_optimization"] = EngineZeroConfig.model_construct(
        _fields_set=set(section.model_fields_set),
        **{name: getattr(section, name) for name in type(section).model_fields},
    )
    made = EngineConfig.model_construct(_fields_set=set(config.model_fields_set), **values)
    private = {**(config.__pydantic_private__ or {}), "_zero_enabled": config.zero_optimization.stage > 0}
    object.__setattr__(made, "__pydantic_private__", private)
    made.record_batch(batch)
    return made
