"""The `scheduler` section: the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import ValidationInfo, field_validator

from windlass.config import parameter_tables
from windlass.config.config_problems import ConfigProblem, ConfigRefusal, ProblemKind
from windlass.config.config_section import ConfigSection
from windlass.config.key_status import honoured
from windlass.config.optimizer_section import OptimizerConfig, build_trial_optimizer, table_from_signature
from windlass.config.parameter_tables import ParameterSpec, ParameterTable

_START = {"last_batch_iteration": ParameterSpec("int", -1, minimum=-1)}
_WARMUP = {
    "warmup_num_steps": ParameterSpec("int", 1000, minimum=1),
    "warmup_type": ParameterSpec("str", "log", choices=("log", "linear")),
    **_START,
}
_RAMP = {
    "warmup_min_lr": ParameterSpec("float or floats", 0.0, minimum=0),
    "warmup_max_lr": ParameterSpec("float or floats", 1e-3, minimum=0),
    **_WARMUP,
}
_TOTAL = {"total_num_steps": ParameterSpec("int", ..., minimum=0)}

SCHEDULER_PARAMETERS: dict[str, ParameterTable] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": ParameterSpec("float or floats", 1e-3, minimum=0),
        "lr_range_test_step_size": ParameterSpec("int", 2000, minimum=1),
        "lr_range_test_step_rate": ParameterSpec("float", 1.0, minimum=0),
        "lr_range_test_staircase": ParameterSpec("bool", False),
        **_START,
    },
    "OneCycle": {
        "cycle_min_lr": ParameterSpec("float or floats", ..., minimum=0),
        "cycle_max_lr": ParameterSpec("float or floats", ..., minimum=0),
        "decay_lr_rate": ParameterSpec("float", 0.0, minimum=0),
        "cycle_first_step_size": ParameterSpec("float", 2000, greater_than=0),
        "cycle_second_step_size": ParameterSpec("float", None, minimum=0),
        "cycle_first_stair_count": ParameterSpec("int", 0, minimum=0),
        "cycle_second_stair_count": ParameterSpec("int", None, minimum=0),
        "decay_step_size": ParameterSpec("float", 0, minimum=0),
        "cycle_momentum": ParameterSpec("bool", True),
        "cycle_min_mom": ParameterSpec("float or floats", 0.8, minimum=0, less_than=1),
        "cycle_max_mom": ParameterSpec("float or floats", 0.9, minimum=0, less_than=1),
        "decay_mom_rate": ParameterSpec("float", 0.0),
        **_START,
    },
    "WarmupLR": {**_RAMP, "warmup_max_lr": ParameterSpec("float or floats", None, minimum=0)},
    "WarmupDecayLR": {**_TOTAL, **_RAMP},
    "WarmupCosineLR": {
        **_TOTAL,
        "warmup_min_ratio": ParameterSpec("float", 0.0, minimum=0),
        "cos_min_ratio": ParameterSpec("float", 1e-4, minimum=0),
        **_WARMUP,
    },
}
"""DeepSpeed's schedules and their parameters. A default of `...` means that the parameter is required."""

_NEEDS_CODE = "it needs Python objects, which JSON cannot hold; pass a schedule to initialize(lr_scheduler=...)"
UNSUPPORTED_SCHEDULES = {
    **dict.fromkeys(("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"), _NEEDS_CODE),
    "LRScheduler": "it is the base class of torch's schedules; name one of them",
    "ReduceLROnPlateau": "it needs a metric at every step; call it yourself after each evaluation",
}
"""Known schedules that are refused, with the reason."""


class SchedulerConfig(ConfigSection):
    """Learning-rate schedule that the engine constructs if the caller passes none."""

    type: str = honoured(...)
    """LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, or a class of torch.optim.lr_scheduler."""
    params: dict[str, Any] = honoured(dict)
    """Parameters of the schedule."""

    @field_validator("type")
    @classmethod
    def _canonical(cls, value: str) -> str:
        return {name.lower(): name for name in (*SCHEDULER_PARAMETERS, *UNSUPPORTED_SCHEDULES)}.get(
            value.lower(), value
        )

    @field_validator("params")
    @classmethod
    def _integral_params(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return parameter_tables.convert_integers(value, SCHEDULER_PARAMETERS.get(info.data.get("type", ""), {}))


def find_parameter_problems(
    scheduler: SchedulerConfig, optimizer: OptimizerConfig | None = None
) -> Iterator[ConfigProblem]:
    """Yield a problem for an unknown type, unknown or missing parameters, and values of the wrong type or range.

    `windlass check` and `initialize` both call this function, so that they accept the same configurations.

    Args:
        optimizer: the optimizer section, with which a torch schedule is constructed on trial; None skips the trial.
    """
    table = _parameter_table(scheduler)
    if table is None:
        yield parameter_tables.unknown_type_problem(
            "scheduler.type", "schedule", scheduler.type, (*SCHEDULER_PARAMETERS, *_torch_classes())
        )
        return
    if scheduler.type in UNSUPPORTED_SCHEDULES:
        return
    found = list(parameter_tables.table_problems("scheduler.params", scheduler.params, table, scheduler.type))
    found += [
        ConfigProblem(ProblemKind.TYPE, f"scheduler.params.{name}", f"{scheduler.type} needs it; add it")
        for name, parameter in table.items()
        if parameter.default is ... and name not in scheduler.params
    ]
    yield from found
    if found or scheduler.type in SCHEDULER_PARAMETERS or optimizer is None or "auto" in scheduler.params.values():
        return
    filled = {name: value for name, value in optimizer.params.items() if value != "auto"}
    yield from parameter_tables.try_construct(
        "scheduler.params",
        scheduler.type,
        lambda: _torch_class(scheduler.type)(build_trial_optimizer(optimizer.type, filled), **scheduler.params),
    )


def find_parameter_refusals(scheduler: SchedulerConfig) -> Iterator[ConfigRefusal]:
    """Yield a refusal for an unsupported type, and for parameters left at "auto"."""
    if scheduler.type in UNSUPPORTED_SCHEDULES:
        yield ConfigRefusal("scheduler.type", scheduler.type, UNSUPPORTED_SCHEDULES[scheduler.type])
        return
    yield from parameter_tables.table_refusals("scheduler.params", scheduler.params, _parameter_table(scheduler) or {})


def _parameter_table(scheduler: SchedulerConfig) -> ParameterTable | None:
    known = SCHEDULER_PARAMETERS.get(scheduler.type)
    if known is not None:
        return known
    by_lower = {name.lower(): name for name in _torch_classes()}
    name = by_lower.get(scheduler.type.lower())
    return table_from_signature(_torch_classes()[name], skip=1) if name else None


def _torch_class(kind: str) -> type:
    return {name.lower(): value for name, value in _torch_classes().items()}[kind.lower()]


@cache
def _torch_classes() -> dict[str, type]:
    """Return every schedule class of the installed torch, by name. Imports torch, so callers look the type up in
    `SCHEDULER_PARAMETERS` first."""
    from torch.optim import lr_scheduler

    return {name: getattr(lr_scheduler, name) for name in lr_scheduler.__all__}
