"""Module `deepspeed.runtime.lr_schedules`: learning-rate schedules and their command-line arguments."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from windlass.compat.rank_logging import logger
from windlass.optim import lr_cycles, lr_warmups
from windlass.optim.lr_cycles import LRRangeTest as LRRangeTest

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"
CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
DECAY_LR_RATE = "decay_lr_rate"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"
WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"
WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"

_SCHEDULE_ARGUMENTS: dict[str, dict[str, Any]] = {
    LR_RANGE_TEST: {
        LR_RANGE_TEST_MIN_LR: 0.001,
        LR_RANGE_TEST_STEP_RATE: 1.0,
        LR_RANGE_TEST_STEP_SIZE: 1000,
        LR_RANGE_TEST_STAIRCASE: False,
    },
    ONE_CYCLE: {
        CYCLE_FIRST_STEP_SIZE: 1000,
        CYCLE_FIRST_STAIR_COUNT: -1,
        CYCLE_SECOND_STEP_SIZE: -1,
        CYCLE_SECOND_STAIR_COUNT: -1,
        DECAY_STEP_SIZE: 1000,
        CYCLE_MIN_LR: 0.01,
        CYCLE_MAX_LR: 0.1,
        DECAY_LR_RATE: 0.0,
        CYCLE_MIN_MOM: 0.8,
        CYCLE_MAX_MOM: 0.9,
        DECAY_MOM_RATE: 0.0,
    },
    WARMUP_LR: {WARMUP_MIN_LR: 0.0, WARMUP_MAX_LR: 0.001, WARMUP_NUM_STEPS: 1000, WARMUP_TYPE: WARMUP_LOG_RATE},
    WARMUP_COSINE_LR: {
        WARMUP_NUM_STEPS: 1000,
        WARMUP_TYPE: WARMUP_LOG_RATE,
        WARMUP_MIN_RATIO: 0.01,
        COS_MIN_RATIO: 0.01,
    },
}
"""Command-line arguments and defaults of each schedule's parameters. `WarmupDecayLR` shares those of `WarmupLR`."""
_SCHEDULE_ARGUMENTS[WARMUP_DECAY_LR] = _SCHEDULE_ARGUMENTS[WARMUP_LR]


class _AnyOfTheRule(type):
    """Metaclass of schedules: `isinstance` is also True for an instance of windlass's own class of the schedule."""

    rule: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.rule) if "rule" in cls.__dict__ else super().__instancecheck__(instance)


def known_warmup(warmup_type: Any) -> Any:
    """Return `warmup_type` if it is "log" or "linear"; else warn and return "log", as DeepSpeed does."""
    if warmup_type in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
        return warmup_type
    logger.warning(f"warmup_type {warmup_type!r} is neither log nor linear; using log")
    return WARMUP_LOG_RATE


class _LenientWarmup:
    """Base class of warmups in which an unknown `warmup_type` means "log". Must be the first base."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = inspect.signature(cls.rule)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind(*args, **kwargs)
        if "warmup_type" in given.arguments:
            given.arguments["warmup_type"] = known_warmup(given.arguments["warmup_type"])
        super().__init__(*given.args, **given.kwargs)


class WarmupLR(_LenientWarmup, lr_warmups.WarmupLR, metaclass=_AnyOfTheRule):
    """Schedule `windlass.optim.WarmupLR`, where an unknown `warmup_type` means "log"."""

    rule = lr_warmups.WarmupLR


class WarmupDecayLR(_LenientWarmup, lr_warmups.WarmupDecayLR, metaclass=_AnyOfTheRule):
    """Schedule `windlass.optim.WarmupDecayLR`, where an unknown `warmup_type` means "log"."""

    rule = lr_warmups.WarmupDecayLR


class WarmupCosineLR(_LenientWarmup, lr_warmups.WarmupCosineLR, metaclass=_AnyOfTheRule):
    """Schedule `windlass.optim.WarmupCosineLR`, where an unknown `warmup_type` means "log"."""

    rule = lr_warmups.WarmupCosineLR


class OneCycle(lr_cycles.OneCycle, metaclass=_AnyOfTheRule):
    """Schedule `windlass.optim.OneCycle`, with DeepSpeed's names for its lengths."""

    rule = lr_cycles.OneCycle

    @property
    def first_step_size(self) -> float:
        """Number of steps in which the rate rises."""
        return self.first_size

    @property
    def second_step_size(self) -> float:
        """Number of steps in which the rate falls."""
        return self.second_size

    @property
    def total_size(self) -> float:
        """Number of steps of the rise and the fall."""
        return self.first_size + self.second_size

    @property
    def step_ratio(self) -> float:
        """Fraction of `total_size` in which the rate rises."""
        return self.first_size / self.total_size


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule` and one argument for each parameter of a schedule. Return the parser."""
    group = parser.add_argument_group("Convergence Tuning", "learning-rate schedules and their parameters")
    group.add_argument(f"--{LR_SCHEDULE}", type=str, default=None, help="one of " + ", ".join(VALID_LR_SCHEDULES))
    group.add_argument("--cycle_momentum", action="store_true", default=False, help="argument of OneCycle")
    added: set[str] = set()
    for schedule, arguments in _SCHEDULE_ARGUMENTS.items():
        for name, default in arguments.items():
            if name in added:
                continue
            added.add(name)
            if isinstance(default, bool):
                group.add_argument(
                    f"--{name}",
                    type=_parse_bool,
                    nargs="?",
                    const=True,
                    default=default,
                    help=f"argument of {schedule}",
                )
            else:
                group.add_argument(f"--{name}", type=type(default), default=default, help=f"argument of {schedule}")
    return parser


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false; write one of these")
    return text.lower() in ("true", "1")


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse the schedules' arguments of the command line. Return `(parsed, remaining arguments)`."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def override_params(args: Any, params: dict[str, Any]) -> None:
    """Copy the values of all schedule arguments into `params`."""
    for schedule in _SCHEDULE_ARGUMENTS:
        _override_schedule_params(schedule, args, params)


def override_lr_range_test_params(args: Any, params: dict[str, Any]) -> None:
    """Copy the values of LRRangeTest's arguments into `params`."""
    _override_schedule_params(LR_RANGE_TEST, args, params)


def override_1cycle_params(args: Any, params: dict[str, Any]) -> None:
    """Copy the values of OneCycle's arguments into `params`."""
    _override_schedule_params(ONE_CYCLE, args, params)


def override_warmupLR_params(args: Any, params: dict[str, Any]) -> None:
    """Copy the values of WarmupLR's arguments into `params`."""
    _override_schedule_params(WARMUP_LR, args, params)


def override_warmupCosineLR_params(args: Any, params: dict[str, Any]) -> None:
    """Copy the values of WarmupCosineLR's arguments into `params`."""
    _override_schedule_params(WARMUP_COSINE_LR, args, params)


def _override_schedule_params(schedule: str, args: Any, params: dict[str, Any]) -> None:
    for name in _SCHEDULE_ARGUMENTS[schedule]:
        if (value := getattr(args, name, None)) is not None:
            params[name] = value


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """Return (the `scheduler` section for the arguments, None), or (None, the reason why there is none)."""
    schedule = getattr(args, LR_SCHEDULE, None)
    if schedule is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    if schedule not in VALID_LR_SCHEDULES:
        return None, f"{schedule} is not supported LR schedule; use one of {', '.join(VALID_LR_SCHEDULES)}"
    params: dict[str, Any] = {}
    _override_schedule_params(schedule, args, params)
    return {"type": schedule, "params": params}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """Return (the learning rate of a `scheduler` section, ""), or (None, the reason why there is none)."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    schedule, params = config["type"], config["params"]
    if schedule not in VALID_LR_SCHEDULES:
        return None, f"{schedule} is not a valid LR schedule; use one of {', '.join(VALID_LR_SCHEDULES)}"
    if schedule == WARMUP_COSINE_LR:
        return None, f"{schedule} multiplies the optimizer's learning rate and sets none"
    key = {LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR, ONE_CYCLE: CYCLE_MAX_LR}.get(schedule, WARMUP_MAX_LR)
    return params[key], ""


def update_lr(param_groups: Sequence[dict[str, Any]], lrs: Sequence[Any]) -> list[Any]:
    """Set the learning rate of each group, in place if it is a tensor. Return the rates."""
    for group, rate in zip(param_groups, lrs, strict=False):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    return [group["lr"] for group in param_groups]


def get_torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer: the argument itself, or the one that it wraps.

    Raises:
        TypeError: neither is a torch optimizer.
    """
    for found in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(found, torch.optim.Optimizer):
            return found
    raise TypeError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer and wraps none; pass one")
