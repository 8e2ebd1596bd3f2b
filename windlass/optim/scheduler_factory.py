"""Construction of a learning-rate schedule from `scheduler.type` and `scheduler.params` of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from windlass.base.errors import ConfigError
from windlass.base.log import logger
from windlass.base.text import nearest_name
from windlass.config.scheduler_section import (
    UNSUPPORTED_SCHEDULES,
    SchedulerConfig,
    find_parameter_problems,
    find_parameter_refusals,
)
from windlass.optim.lr_cycles import LRRangeTest, OneCycle
from windlass.optim.lr_schedule import HasParamGroups, LRSchedule
from windlass.optim.lr_warmups import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "OWN_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "LRSchedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_scheduler",
    "list_scheduler_names",
    "check_scheduler",
    "resolve_scheduler_class",
]

OWN_SCHEDULES: dict[str, type[LRSchedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
"""Schedules of this package, by their names in configurations."""

_TORCH_CLASSES: dict[str, type[Any]] = {
    name: cls
    for name, cls in vars(torch.optim.lr_scheduler).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.lr_scheduler.LRScheduler) and not name.startswith("_")
}


def list_scheduler_names() -> list[str]:
    """Return every name that `build_scheduler` takes, those of `OWN_SCHEDULES` first."""
    return [
        *OWN_SCHEDULES,
        *sorted(name for name in _TORCH_CLASSES if name not in UNSUPPORTED_SCHEDULES and name not in OWN_SCHEDULES),
    ]


def resolve_scheduler_class(type: str) -> type[Any]:
    """Return the class of `scheduler.type`, ignoring case.

    Raises:
        ConfigError: the name is unknown (the message has the nearest one) or refused (the message has the reason).
    """
    classes = {**_TORCH_CLASSES, **OWN_SCHEDULES}
    name = {known.lower(): known for known in classes}.get(str(type).lower())
    if name is None:
        near = nearest_name(str(type), list_scheduler_names())
        hint = f"; nearest is {near}" if near else ""
        raise ConfigError(f"scheduler.type {type!r} is unknown{hint}; known: {', '.join(list_scheduler_names())}")
    if name in UNSUPPORTED_SCHEDULES:
        raise ConfigError(f"scheduler.type {name!r} is refused: {UNSUPPORTED_SCHEDULES[name]}")
    return classes[name]


def check_scheduler(type: str, params: Mapping[str, Any] | None) -> list[str]:
    """Return one sentence for each problem in `scheduler.type` and `scheduler.params`. Needs no optimizer."""
    section = SchedulerConfig(type=str(type), params=dict(params or {}))
    return [str(one) for one in (*find_parameter_problems(section), *find_parameter_refusals(section))]


def build_scheduler(type: str, params: Mapping[str, Any] | None, optimizer: HasParamGroups) -> Any:
    """Build the schedule that a configuration names.

    Args:
        type: a key of `OWN_SCHEDULES` or a class of `torch.optim.lr_scheduler`, ignoring case.
        optimizer: any object with `param_groups`; torch's own classes require a torch optimizer.

    Raises:
        ConfigError: an unknown or refused name, missing or unknown parameters (reported together), or rejected values.
    """
    wrong = check_scheduler(type, params)
    if wrong:
        raise ConfigError("\n".join(wrong))
    section = SchedulerConfig(type=type, params=dict(params or {}))
    cls, given = resolve_scheduler_class(section.type), section.params
    before = [float(group["lr"]) for group in optimizer.param_groups]
    make: Callable[..., Any] = cls
    try:
        schedule = make(optimizer, **given)
    except Exception as error:  # any error of a third-party constructor
        raise ConfigError(f"scheduler {type} with params {given} was refused by {cls.__name__}: {error}") from error
    if isinstance(schedule, WarmupLR) and schedule.max_lrs != before:
        logger.info(f"scheduler.params.warmup_max_lr {schedule.max_lrs} replaces the optimizer's lr {before}")
    return schedule
