"""From `scheduler.type` and `scheduler.params` of a configuration to a learning-rate schedule."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from windlass.base.errors import ConfigError
from windlass.base.log import logger
from windlass.optim.lr_cycles import LRRangeTest, OneCycle
from windlass.optim.lr_schedule import HasParamGroups, Schedule
from windlass.optim.lr_warmups import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "VALID_NAMES",
    "LRRangeTest",
    "OneCycle",
    "Schedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build",
    "names",
    "problems",
    "resolve_class",
]

VALID_NAMES: dict[str, type[Schedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
"""The schedules of DeepSpeed's configuration, by name."""

_TORCH: dict[str, type[Any]] = {
    name: cls
    for name, cls in vars(torch.optim.lr_scheduler).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.lr_scheduler.LRScheduler) and not name.startswith("_")
}
_NEEDS_CODE = "needs Python objects that a configuration cannot hold; pass a scheduler to initialize(lr_scheduler=...)"
_REFUSED = {
    "LRScheduler": "is the base class of torch's schedulers; name one of them",
    "LambdaLR": _NEEDS_CODE,
    "MultiplicativeLR": _NEEDS_CODE,
    "SequentialLR": _NEEDS_CODE,
    "ChainedScheduler": _NEEDS_CODE,
    "ReduceLROnPlateau": "needs a metric at every step; call it yourself after each evaluation",
}


def names() -> list[str]:
    """Every name that `build` takes, DeepSpeed's first."""
    return [*VALID_NAMES, *sorted(name for name in _TORCH if name not in _REFUSED and name not in VALID_NAMES)]


def resolve_class(type: str) -> type[Any]:
    """The class behind `scheduler.type`, in any case.

    Raises:
        ConfigError: the name is unknown (with the nearest one) or refused (with the reason).
    """
    classes = {**_TORCH, **VALID_NAMES}
    name = {known.lower(): known for known in classes}.get(str(type).lower())
    if name is None:
        near = difflib.get_close_matches(str(type), names(), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"scheduler.type {type!r} is unknown{hint}; known: {', '.join(names())}")
    if name in _REFUSED:
        raise ConfigError(f"scheduler.type {name!r} is refused: it {_REFUSED[name]}")
    return classes[name]


def problems(type: str, params: Mapping[str, Any] | None) -> list[str]:
    """What is wrong with `scheduler.type` and `scheduler.params`, one sentence each; needs no optimizer."""
    try:
        cls = resolve_class(type)
    except ConfigError as error:
        return [str(error)]
    signature = dict(list(inspect.signature(cls.__init__).parameters.items())[2:])
    required = [name for name, parameter in signature.items() if parameter.default is inspect.Parameter.empty]
    given = params or {}
    found = [f"scheduler.params.{name} is missing; {cls.__name__} needs it" for name in required if name not in given]
    for name, value in given.items():
        if name not in signature:
            near = difflib.get_close_matches(name, signature, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            found.append(
                f"scheduler.params.{name} is no parameter of {cls.__name__}{hint}; it takes {', '.join(signature)}"
            )
        elif value == "auto":
            found.append(f"scheduler.params.{name} is 'auto' and nothing filled it in; write a value")
    return found


def build(type: str, params: Mapping[str, Any] | None, optimizer: HasParamGroups) -> Any:
    """The schedule that a configuration names.

    Args:
        type: a name of `VALID_NAMES` or a class of `torch.optim.lr_scheduler`, in any case.
        optimizer: anything with `param_groups`; torch's own classes insist on a torch optimizer.

    Raises:
        ConfigError: an unknown or refused name, missing or unknown parameters (all of them at once), or refused values.
    """
    wrong = problems(type, params)
    if wrong:
        raise ConfigError("\n".join(wrong))
    cls, given = resolve_class(type), dict(params or {})
    before = [float(group["lr"]) for group in optimizer.param_groups]
    make: Callable[..., Any] = cls
    try:
        schedule = make(optimizer, **given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler {type} with params {given} was refused by {cls.__name__}: {error}") from error
    if isinstance(schedule, WarmupLR) and schedule.max_lrs != before:
        logger.info(f"scheduler.params.warmup_max_lr {schedule.max_lrs} replaces the optimizer's lr {before}")
    return schedule
