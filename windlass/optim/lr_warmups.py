"""Schedules that warm up, then stay constant, decay linearly, or decay as a cosine."""

from __future__ import annotations

import math

from windlass.base.log import logger
from windlass.optim.lr_schedule import HasParamGroups, LRSchedule, PerGroup, per_group, positive_integer


class WarmupLR(LRSchedule):
    """Warm-up from min to max over `warmup_num_steps`, then constant: lr = min + (max - min) w(iteration).

    w(i) = log(i + 1) / log(steps), or i / steps with `warmup_type` linear; 1 from i = steps on.

    Args:
        warmup_max_lr: None means each group's initial rate.
        warmup_num_steps: 1 counts as 2.

    Raises:
        ValueError: `warmup_num_steps` is not a positive integer, `warmup_type` is neither log nor linear, or a list
            does not match the parameter groups.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        most = _initial_lrs(optimizer, last_batch_iteration) if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = per_group(optimizer, warmup_min_lr, "warmup_min_lr")
        self.max_lrs = per_group(optimizer, most, "warmup_max_lr")
        self.warmup_num_steps = max(2, positive_integer(warmup_num_steps, "warmup_num_steps"))
        self.warmup_type = _check_warmup_type(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at `last_batch_iteration`."""
        gamma = self._lr_ratio() if self.last_batch_iteration >= 0 else 0.0
        return [least + (most - least) * gamma for least, most in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _lr_ratio(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return _warmup_factor(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)
        return 1.0


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, followed by a linear decay to the minimum at `total_num_steps`.

    Raises:
        ValueError: see `WarmupLR`.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_if_short(total_num_steps, self.warmup_num_steps)

    def _lr_ratio(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return super()._lr_ratio()
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(LRSchedule):
    """Initial rate times a ratio that warms up from `warmup_min_ratio` to 1, then decays as a cosine to
    `cos_min_ratio`.

    From i = warmup on, with c = `cos_min_ratio`: ratio = c + (1 - c) (1 + cos(pi (i + 1 - warmup) / (total - warmup)))
    / 2, and c once i + 1 >= total. The first optimizer step uses `warmup_min_ratio`.

    Source: Loshchilov and Hutter, "SGDR", arXiv:1608.03983, equation 5 without restarts.

    Raises:
        ValueError: `warmup_num_steps` is not a positive integer, or `warmup_type` is neither log nor linear.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.warmup_num_steps = max(2, positive_integer(warmup_num_steps, "warmup_num_steps"))
        self.cos_min_ratio = cos_min_ratio
        self.warmup_type = _check_warmup_type(warmup_type)
        self.base_lrs = _initial_lrs(optimizer, last_batch_iteration)
        _warn_if_short(total_num_steps, self.warmup_num_steps)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at `last_batch_iteration`."""
        ratio = self.get_lr_ratio()
        return [base * ratio for base in self.base_lrs]

    def get_lr_ratio(self) -> float:
        """Return the ratio of the rates at `last_batch_iteration` to the initial rates."""
        if self.last_batch_iteration < self.warmup_num_steps:
            iteration = max(0, self.last_batch_iteration)
            warmth = _warmup_factor(iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * warmth
        span = max(1, self.total_num_steps - self.warmup_num_steps)
        done = min(1.0, (self.last_batch_iteration + 1 - self.warmup_num_steps) / span)
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2)


def _warmup_factor(iteration: int, steps: int, warmup_type: str) -> float:
    return math.log(iteration + 1) / math.log(steps) if warmup_type == "log" else iteration / steps


def _check_warmup_type(name: str) -> str:
    if name not in ("log", "linear"):
        raise ValueError(f"warmup_type is {name!r}; use log or linear")
    return name


def _warn_if_short(total: int, warmup: int) -> None:
    if total < warmup:
        logger.warning(
            f"scheduler: total_num_steps {total} is less than warmup_num_steps {warmup}, "
            "so training ends before the warm-up does"
        )


def _initial_lrs(optimizer: HasParamGroups, last_batch_iteration: int) -> list[float]:
    """Return each group's rate before any schedule. As torch's schedulers do, store it in the group as `initial_lr`."""
    for group in optimizer.param_groups:
        if last_batch_iteration < 0 or "initial_lr" not in group:
            group["initial_lr"] = float(group["lr"])
    return [group["initial_lr"] for group in optimizer.param_groups]
