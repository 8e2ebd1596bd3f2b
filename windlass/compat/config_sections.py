"""DeepSpeed's pydantic models of single configuration sections, for scripts that construct them.

An example is `DeepSpeedZeroConfig`. Training uses the sections in `windlass.config`. The models here accept the same
keys and validate them by the same rules. In addition they ignore values "auto", are mutable, and have DeepSpeed's names
and defaults.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from windlass.compat.rank_logging import logger
from windlass.config.config_section import ConfigSection
from windlass.config.monitor_section import FlopsProfiler
from windlass.config.offload_section import OffloadOptimizer, OffloadParam
from windlass.config.precision_section import Bf16, Fp16
from windlass.config.zero_section import LeafModuleConfig, ZeroConfig

DEFAULT_LEAF_MODULE_CLASSES = [
    f"transformers.models.{name}.modeling_{name}.{block}"
    for name, block in (
        ("mixtral", "MixtralSparseMoeBlock"),
        ("qwen2_moe", "Qwen2MoeSparseMoeBlock"),
        ("qwen3_moe", "Qwen3MoeSparseMoeBlock"),
    )
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


def _require_number(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "must be a number, not bool")
    try:
        float(value)
    except (TypeError, ValueError):
        raise PydanticCustomError("number_type", "must be a number") from None
    return value


Number = BeforeValidator(_require_number)


class _MutableSection(ConfigSection):
    """Mutable section, constructed from keywords. Values "auto" are ignored unless `strict`."""

    model_config = ConfigDict(frozen=False, populate_by_name=True, validate_assignment=True, hide_input_in_errors=False)

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(**(data if strict else {key: value for key, value in data.items() if value != "auto"}))


class DeepSpeedFP16Config(Fp16, _MutableSection):
    """Section `Fp16` that requires a positive loss-scale window and minimum scale only for dynamic loss scaling."""

    loss_scale: Annotated[float, Number] = 0.0
    loss_scale_window: Annotated[int, Number] = 1000
    min_loss_scale: Annotated[int, Number] = 1

    @model_validator(mode="after")
    def _is_usable(self) -> DeepSpeedFP16Config:
        if not 0 <= self.loss_scale < float("inf"):
            raise PydanticCustomError("loss_scale", "fp16.loss_scale must be a finite number >= 0 (0 is dynamic)")
        for name in ("loss_scale_window", "min_loss_scale"):
            if self.enabled and self.loss_scale == 0 and getattr(self, name) <= 0:
                raise PydanticCustomError("dynamic", f"fp16.{name} must be > 0 if the loss scale is dynamic")
        return self

    def initial_dynamic_scale(self) -> int:
        """Return the initial scale of dynamic loss scaling."""
        return int(2**self.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the arguments of `DynamicLossScaler` under DeepSpeed's names."""
        return {
            "init_scale": 2**self.initial_scale_power,
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


class DeepSpeedBF16Config(Bf16, _MutableSection):
    """Mutable section `Bf16`."""


class DeepSpeedZeroLeafModuleConfig(LeafModuleConfig, _MutableSection):
    """Section `LeafModuleConfig` with DeepSpeed's list of classes by default."""

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            "classes": list(DEFAULT_LEAF_MODULE_CLASSES),
            "names": list(DEFAULT_LEAF_MODULE_NAMES),
            "name_suffixes": list(DEFAULT_LEAF_MODULE_NAME_SUFFIXES),
            **given,
        }

    @model_validator(mode="after")
    def _drop_duplicates(self) -> DeepSpeedZeroLeafModuleConfig:
        for name in ("classes", "names", "name_suffixes"):
            self.__dict__[name] = list(dict.fromkeys(getattr(self, name)))
        return self


class DeepSpeedZeroOffloadParamConfig(OffloadParam, _MutableSection):
    """Mutable section `OffloadParam`."""


class DeepSpeedZeroOffloadOptimizerConfig(OffloadOptimizer, _MutableSection):
    """Mutable section `OffloadOptimizer`."""

    @property
    def pipeline(self) -> bool:
        """True if reads or writes overlap with the update."""
        return self.pipeline_read or self.pipeline_write


class DeepSpeedFlopsProfilerConfig(FlopsProfiler, _MutableSection):
    """Mutable section `FlopsProfiler`, read from a full configuration."""

    def __init__(self, param_dict: dict[str, Any]) -> None:
        super().__init__(**(param_dict.get("flops_profiler") or {}))


STAGE_3_KEYS = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
"""Keys of stage 3 as DeepSpeed's class names them, without `stage3_`."""


class DeepSpeedZeroConfig(ZeroConfig, _MutableSection):
    """Section `ZeroConfig` that also accepts stage-3 keys without `stage3_`.

    `overlap_comm` is true by default at stage 3 only.
    """

    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    leaf_module: DeepSpeedZeroLeafModuleConfig = DeepSpeedZeroLeafModuleConfig()

    @model_validator(mode="before")
    @classmethod
    def _expand_short_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        found = {f"stage3_{key}" if key in STAGE_3_KEYS else key: value for key, value in given.items()}
        if "stage3_gather_fp16_weights_on_model_save" in found:
            found["stage3_gather_16bit_weights_on_model_save"] = found.pop("stage3_gather_fp16_weights_on_model_save")
        for old, new in (("cpu_offload_param", "offload_param"), ("cpu_offload", "offload_optimizer")):
            if found.get(old) and found.get(new) is None:
                found[new] = {"device": "cpu"}
        if found.get("overlap_comm") is None:
            found["overlap_comm"] = int(found.get("stage", 0)) == 3
        if found.get("elastic_checkpoint") and int(found.get("stage", 0)) == 3:
            logger.warning(
                "zero_optimization.elastic_checkpoint: elastic checkpointing is deprecated at stage 3, since "
                "checkpoints load on any number of ranks; delete the key"
            )
        return found


def stage_3_property(name: str) -> property:
    """Return a property that reads and sets `stage3_name`."""
    return property(
        lambda self: getattr(self, f"stage3_{name}"),
        lambda self, value: setattr(self, f"stage3_{name}", value),
        doc=f"`stage3_{name}`.",
    )


for _name in STAGE_3_KEYS:
    setattr(DeepSpeedZeroConfig, _name, stage_3_property(_name))
