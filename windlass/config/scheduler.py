"""The `scheduler` section: how the learning rate moves with the steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import ValidationInfo, field_validator

from windlass.config import parameters
from windlass.config.optimizer import signature_table
from windlass.config.parameters import Parameter, Table
from windlass.config.problems import Kind, Problem, Refusal
from windlass.config.section import Section
from windlass.config.verdict import honoured

_START = {"last_batch_iteration": Parameter("int", -1)}
_WARMUP = {"warmup_num_steps": Parameter("int", 1000), "warmup_type": Parameter("str", "log"), **_START}
_RAMP = {
    "warmup_min_lr": Parameter("float or floats", 0.0),
    "warmup_max_lr": Parameter("float or floats", 1e-3),
    **_WARMUP,
}
_TOTAL = {"total_num_steps": Parameter("int", ...)}

PARAMETERS: dict[str, Table] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": Parameter("float or floats", 1e-3),
        "lr_range_test_step_size": Parameter("int", 2000),
        "lr_range_test_step_rate": Parameter("float", 1.0),
        "lr_range_test_staircase": Parameter("bool", False),
        **_START,
    },
    "OneCycle": {
        "cycle_min_lr": Parameter("float or floats", ...),
        "cycle_max_lr": Parameter("float or floats", ...),
        "decay_lr_rate": Parameter("float", 0.0),
        "cycle_first_step_size": Parameter("float", 2000),
        "cycle_second_step_size": Parameter("float", None),
        "cycle_first_stair_count": Parameter("int", 0),
        "cycle_second_stair_count": Parameter("int", None),
        "decay_step_size": Parameter("float", 0),
        "cycle_momentum": Parameter("bool", True),
        "cycle_min_mom": Parameter("float or floats", 0.8),
        "cycle_max_mom": Parameter("float or floats", 0.9),
        "decay_mom_rate": Parameter("float", 0.0),
        **_START,
    },
    "WarmupLR": {**_RAMP, "warmup_max_lr": Parameter("float or floats", None)},
    "WarmupDecayLR": {**_TOTAL, **_RAMP},
    "WarmupCosineLR": {
        **_TOTAL,
        "warmup_min_ratio": Parameter("float", 0.0),
        "cos_min_ratio": Parameter("float", 1e-4),
        **_WARMUP,
    },
}
"""DeepSpeed's schedules and their parameters; a default of `...` means that the parameter must be given."""

_NEEDS_CODE = "it needs Python objects, which JSON cannot hold; pass a schedule to initialize(lr_scheduler=...)"
UNBUILT_TYPES = {
    **dict.fromkeys(("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"), _NEEDS_CODE),
    "ReduceLROnPlateau": "it needs a metric at every step; call it yourself after each evaluation",
}
"""Schedules that are known and refused, and why."""


class SchedulerConfig(Section):
    """Which schedule the engine builds when the caller gives none."""

    type: str = honoured(...)
    """LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, or a class of torch.optim.lr_scheduler."""
    params: dict[str, Any] = honoured(dict)
    """Its parameters."""

    @field_validator("type")
    @classmethod
    def _canonical(cls, value: str) -> str:
        return {name.lower(): name for name in (*PARAMETERS, *UNBUILT_TYPES)}.get(value.lower(), value)

    @field_validator("params")
    @classmethod
    def _whole_numbers(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return parameters.integral(value, PARAMETERS.get(info.data.get("type", ""), {}))


def parameter_problems(scheduler: SchedulerConfig) -> Iterator[Problem]:
    """An unknown type, unknown or missing parameters, and values of the wrong shape."""
    table = _table(scheduler)
    if table is None:
        yield parameters.unknown_type("scheduler.type", "schedule", scheduler.type, (*PARAMETERS, *_torch_classes()))
        return
    if scheduler.type in UNBUILT_TYPES:
        return
    yield from parameters.problems("scheduler.params", scheduler.params, table, scheduler.type)
    for name, parameter in table.items():
        if parameter.default is ... and name not in scheduler.params:
            yield Problem(Kind.TYPE, f"scheduler.params.{name}", f"{scheduler.type} needs it; add it")


def parameter_refusals(scheduler: SchedulerConfig) -> Iterator[Refusal]:
    """A type that is not built, and parameters left at "auto"."""
    if scheduler.type in UNBUILT_TYPES:
        yield Refusal("scheduler.type", scheduler.type, UNBUILT_TYPES[scheduler.type])
        return
    yield from parameters.refusals("scheduler.params", scheduler.params, _table(scheduler) or {})


def _table(scheduler: SchedulerConfig) -> Table | None:
    known = PARAMETERS.get(scheduler.type)
    if known is not None:
        return known
    by_lower = {name.lower(): table for name, table in _torch_classes().items()}
    return by_lower.get(scheduler.type.lower())


@cache
def _torch_classes() -> dict[str, Table]:
    """Every schedule of the installed torch with its parameters; imports torch, so it is asked last."""
    from torch.optim import lr_scheduler

    classes = {name: getattr(lr_scheduler, name) for name in lr_scheduler.__all__ if name != "LRScheduler"}
    return {name: signature_table(value, skip=1) for name, value in classes.items()}
