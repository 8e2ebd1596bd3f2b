"""The `scheduler` section: how the learning rate moves with the steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import ValidationInfo, field_validator

from windlass.config import parameters
from windlass.config.optimizer import OptimizerConfig, signature_table, stand_in
from windlass.config.parameters import Parameter, Table
from windlass.config.problems import Kind, Problem, Refusal
from windlass.config.section import Section
from windlass.config.verdict import honoured

_START = {"last_batch_iteration": Parameter("int", -1, least=-1)}
_WARMUP = {
    "warmup_num_steps": Parameter("int", 1000, least=1),
    "warmup_type": Parameter("str", "log", choices=("log", "linear")),
    **_START,
}
_RAMP = {
    "warmup_min_lr": Parameter("float or floats", 0.0, least=0),
    "warmup_max_lr": Parameter("float or floats", 1e-3, least=0),
    **_WARMUP,
}
_TOTAL = {"total_num_steps": Parameter("int", ..., least=0)}

PARAMETERS: dict[str, Table] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": Parameter("float or floats", 1e-3, least=0),
        "lr_range_test_step_size": Parameter("int", 2000, least=1),
        "lr_range_test_step_rate": Parameter("float", 1.0, least=0),
        "lr_range_test_staircase": Parameter("bool", False),
        **_START,
    },
    "OneCycle": {
        "cycle_min_lr": Parameter("float or floats", ..., least=0),
        "cycle_max_lr": Parameter("float or floats", ..., least=0),
        "decay_lr_rate": Parameter("float", 0.0, least=0),
        "cycle_first_step_size": Parameter("float", 2000, above=0),
        "cycle_second_step_size": Parameter("float", None, least=0),
        "cycle_first_stair_count": Parameter("int", 0, least=0),
        "cycle_second_stair_count": Parameter("int", None, least=0),
        "decay_step_size": Parameter("float", 0, least=0),
        "cycle_momentum": Parameter("bool", True),
        "cycle_min_mom": Parameter("float or floats", 0.8, least=0, below=1),
        "cycle_max_mom": Parameter("float or floats", 0.9, least=0, below=1),
        "decay_mom_rate": Parameter("float", 0.0),
        **_START,
    },
    "WarmupLR": {**_RAMP, "warmup_max_lr": Parameter("float or floats", None, least=0)},
    "WarmupDecayLR": {**_TOTAL, **_RAMP},
    "WarmupCosineLR": {
        **_TOTAL,
        "warmup_min_ratio": Parameter("float", 0.0, least=0),
        "cos_min_ratio": Parameter("float", 1e-4, least=0),
        **_WARMUP,
    },
}
"""DeepSpeed's schedules and their parameters; a default of `...` means that the parameter must be given."""

_NEEDS_CODE = "it needs Python objects, which JSON cannot hold; pass a schedule to initialize(lr_scheduler=...)"
UNBUILT_TYPES = {
    **dict.fromkeys(("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"), _NEEDS_CODE),
    "LRScheduler": "it is the base class of torch's schedules; name one of them",
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


def parameter_problems(scheduler: SchedulerConfig, optimizer: OptimizerConfig | None = None) -> Iterator[Problem]:
    """An unknown type, unknown or missing parameters, and values of the wrong shape or range.

    `windlass check` and `initialize` both ask here, so that what one accepts the other does not refuse.

    Args:
        optimizer: the section beside it, whose optimizer a schedule of torch is tried on; without one it is not tried.
    """
    table = _table(scheduler)
    if table is None:
        yield parameters.unknown_type("scheduler.type", "schedule", scheduler.type, (*PARAMETERS, *_torch_classes()))
        return
    if scheduler.type in UNBUILT_TYPES:
        return
    found = list(parameters.problems("scheduler.params", scheduler.params, table, scheduler.type))
    found += [
        Problem(Kind.TYPE, f"scheduler.params.{name}", f"{scheduler.type} needs it; add it")
        for name, parameter in table.items()
        if parameter.default is ... and name not in scheduler.params
    ]
    yield from found
    if found or scheduler.type in PARAMETERS or optimizer is None or "auto" in scheduler.params.values():
        return
    filled = {name: value for name, value in optimizer.params.items() if value != "auto"}
    yield from parameters.trial(
        "scheduler.params",
        scheduler.type,
        lambda: _torch_class(scheduler.type)(stand_in(optimizer.type, filled), **scheduler.params),
    )


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
    by_lower = {name.lower(): name for name in _torch_classes()}
    name = by_lower.get(scheduler.type.lower())
    return signature_table(_torch_classes()[name], skip=1) if name else None


def _torch_class(kind: str) -> type:
    return {name.lower(): value for name, value in _torch_classes().items()}[kind.lower()]


@cache
def _torch_classes() -> dict[str, type]:
    """Every schedule of the installed torch; imports torch, so it is asked last."""
    from torch.optim import lr_scheduler

    return {name: getattr(lr_scheduler, name) for name in lr_scheduler.__all__}
