"""Functions `get_*` of `deepspeed.runtime.config` and `.precision_config`. Each reads one configuration value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from windlass.base.dtypes import parse_dtype
from windlass.base.errors import ConfigError
from windlass.compat import runtime_constants as words
from windlass.compat.config_sections import DeepSpeedBF16Config, DeepSpeedFP16Config


class ValueConfigError(ConfigError, ValueError):
    """Error for an invalid value of a configuration key. DeepSpeed raises ValueError here."""


# Function name -> (key, default).
_SCALAR_KEYS: dict[str, tuple[str, Any]] = {
    f"get_{name.lower()}": (getattr(words, name), getattr(words, f"{name}_DEFAULT"))
    for name in (
        "GRADIENT_ACCUMULATION_STEPS",
        "MANAGED_GRADIENT_ACCUMULATION",
        "PRESCALE_GRADIENTS",
        "GRADIENT_PREDIVIDE_FACTOR",
        "STEPS_PER_PRINT",
        "DISABLE_ALLGATHER",
        "DUMP_STATE",
        "DISABLE_PYTHON_GC",
        "GRADIENT_CLIPPING",
        "ZERO_ALLOW_UNTESTED_OPTIMIZER",
        "ZERO_FORCE_DS_CPU_OPTIMIZER",
        "TRAIN_BATCH_SIZE",
        "TRAIN_MICRO_BATCH_SIZE_PER_GPU",
        "WALL_CLOCK_BREAKDOWN",
        "MEMORY_BREAKDOWN",
        "DATALOADER_DROP_LAST",
        "LOG_LEVEL",
    )
}


def _make_getter(name: str, key: str, default: Any) -> Callable[[dict[str, Any]], Any]:
    def get(param_dict: dict[str, Any]) -> Any:
        return param_dict.get(key, default)

    get.__name__ = get.__qualname__ = name
    get.__doc__ = f"Return `{key}`, {default!r} if it is absent."
    return get


for _name, (_key, _default) in _SCALAR_KEYS.items():
    globals()[_name] = _make_getter(_name, _key, _default)


def get_bfloat16_config(param_dict: dict[str, Any]) -> DeepSpeedBF16Config:
    """Return the section `bf16`, or `bfloat16` if `bf16` is absent."""
    section = param_dict.get(words.BFLOAT16)
    return DeepSpeedBF16Config(**(param_dict.get(words.BFLOAT16_OLD, {}) if section is None else section))


def get_float16_config(param_dict: dict[str, Any]) -> DeepSpeedFP16Config:
    """Return the section `fp16`."""
    return DeepSpeedFP16Config(**param_dict.get(words.FP16, {}))


def get_torch_autocast_enabled(param_dict: dict[str, Any]) -> bool:
    """Return `torch_autocast.enabled`."""
    section = param_dict.get(words.TORCH_AUTOCAST, {})
    return bool(section.get(words.TORCH_AUTOCAST_ENABLED, words.TORCH_AUTOCAST_ENABLED_DEFAULT))


def get_torch_autocast_dtype(param_dict: dict[str, Any]) -> torch.dtype | None:
    """Return `torch_autocast.dtype`, None if it is absent."""
    given = param_dict.get(words.TORCH_AUTOCAST, {}).get(words.TORCH_AUTOCAST_DTYPE)
    return None if given is None else parse_dtype(given)


def get_lower_precision_safe_modules(param_dict: dict[str, Any]) -> list[str] | None:
    """Return `torch_autocast.lower_precision_safe_modules`, None if it is absent.

    Raises:
        ValueConfigError: an item is not a string.
    """
    key = words.TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES
    given: list[str] | None = param_dict.get(words.TORCH_AUTOCAST, {}).get(key)
    if given is not None and not all(isinstance(name, str) for name in given):
        raise ValueConfigError(f"torch_autocast.{key} is {given!r}; write a list of class names")
    return given


def get_communication_data_type(
    param_dict: dict[str, Any],
    comm_type: str = words.COMMUNICATION_DATA_TYPE,
    comm_data_type_default: str | None = words.COMMUNICATION_DATA_TYPE_DEFAULT,
) -> torch.dtype | None:
    """Return the dtype under the key `comm_type`, or that of `comm_data_type_default` if the key is absent.

    Raises:
        ValueConfigError: the value is not fp16, bf16 or fp32.
    """
    given = param_dict.get(comm_type, comm_data_type_default)
    if given is None:
        return None
    if str(given).lower() not in ("fp16", "bf16", "fp32"):
        raise ValueConfigError(f"Invalid {comm_type}: {given!r}; write fp16, bf16 or fp32")
    return parse_dtype(str(given).lower())


def get_gradient_allreduce_op(param_dict: dict[str, Any]) -> str:
    """Return `gradient_allreduce_op` in lower case.

    Raises:
        ValueConfigError: the value is not mean or sum.
    """
    given = param_dict.get(words.GRADIENT_ALLREDUCE_OP, words.GRADIENT_ALLREDUCE_OP_DEFAULT)
    found = given.lower() if isinstance(given, str) else given
    if found not in words.GRADIENT_ALLREDUCE_OP_SUPPORTED:
        raise ValueConfigError(f"Invalid {words.GRADIENT_ALLREDUCE_OP}: {given!r}; write mean or sum")
    return str(found)


def get_pipeline_config(param_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the section `pipeline` merged over DeepSpeed's defaults."""
    return {
        "stages": "auto",
        "partition": "best",
        "seed_layers": False,
        "activation_checkpoint_interval": 0,
        "pipe_partitioned": True,
        "grad_partitioned": True,
        **param_dict.get("pipeline", {}),
    }


def get_optimizer_name(param_dict: dict[str, Any]) -> str | None:
    """Return `optimizer.type`, None if it is absent."""
    name: str | None = _section_value(param_dict, words.OPTIMIZER, words.TYPE)
    return name


def get_optimizer_params(param_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Return `optimizer.params`, None if there is no optimizer."""
    return None if get_optimizer_name(param_dict) is None else _section_value(param_dict, words.OPTIMIZER, "params")


def get_optimizer_gradient_clipping(param_dict: dict[str, Any]) -> float | None:
    """Return `optimizer.params.max_grad_norm`, None if it is absent."""
    return (get_optimizer_params(param_dict) or {}).get(words.MAX_GRAD_NORM)


def get_optimizer_legacy_fusion(param_dict: dict[str, Any]) -> bool:
    """Return `optimizer.legacy_fusion`."""
    return bool(param_dict.get(words.OPTIMIZER, {}).get(words.LEGACY_FUSION, words.LEGACY_FUSION_DEFAULT))


def get_scheduler_name(param_dict: dict[str, Any]) -> str | None:
    """Return `scheduler.type`, None if it is absent."""
    name: str | None = _section_value(param_dict, words.SCHEDULER, words.TYPE)
    return name


def get_scheduler_params(param_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Return `scheduler.params`; None if there is no scheduler."""
    return None if get_scheduler_name(param_dict) is None else _section_value(param_dict, words.SCHEDULER, "params")


def get_expert_data_topo_config(param_dict: dict[str, Any]) -> bool:
    """Return `use_data_before_expert_parallelism`."""
    key, default = words.USE_DATA_BEFORE_EXPERT_PARALLEL, words.USE_DATA_BEFORE_EXPERT_PARALLEL_DEFAULT
    return bool(param_dict.get(key, default))


def get_checkpoint_params(param_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the section `checkpoint`."""
    return dict(param_dict.get(words.CHECKPOINT, {}))


def get_data_types_params(param_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the section `data_types`."""
    return dict(param_dict.get(words.DATA_TYPES, {}))


def get_checkpoint_tag_validation_mode(checkpoint_params: dict[str, Any]) -> str:
    """Return `tag_validation` of the section `checkpoint`, in upper case.

    Raises:
        ConfigError: the value is not WARN, IGNORE or FAIL.
    """
    given = checkpoint_params.get(words.CHECKPOINT_TAG_VALIDATION, words.CHECKPOINT_TAG_VALIDATION_DEFAULT)
    if given.upper() not in words.CHECKPOINT_TAG_VALIDATION_MODES:
        raise ConfigError(f"checkpoint.tag_validation is {given!r}; write Warn, Ignore or Fail")
    return str(given.upper())


def _section_value(param_dict: dict[str, Any], section: str, key: str) -> Any:
    return param_dict.get(section, {}).get(key)
