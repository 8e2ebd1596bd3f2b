"""Schedules for a learning-rate range test and for one learning-rate cycle: LRRangeTest and OneCycle."""

from __future__ import annotations

import math

from windlass.base.log import logger
from windlass.optim.lr_schedule import HasParamGroups, LRSchedule, PerGroup, per_group, positive_integer


class LRRangeTest(LRSchedule):
    """Linear growth: min_lr * (1 + step_rate * n) with n = (iteration + 1) / step_size, rounded down with `staircase`.

    Source: Smith, "A disciplined approach to neural network hyper-parameters: Part 1", arXiv:1803.09820.

    Raises:
        ValueError: `lr_range_test_step_size` is not a positive integer, or a list does not match the parameter groups.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = per_group(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = positive_integer(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at `last_batch_iteration`."""
        intervals = (self.last_batch_iteration + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(intervals) if self.staircase else intervals)
        return [least * growth for least in self.min_lrs]


class OneCycle(LRSchedule):
    """One cycle from min to max and back, then decay. The momentum moves in the opposite direction.

    At iteration i, with the position p = i + 1 modulo the cycle length first + second:

        height = p / first on the way up, (first + second - p) / second on the way down, rounded down to stairs if set
        lr     = cycle_min_lr + (cycle_max_lr - cycle_min_lr) height
        beta1  = cycle_max_mom - (cycle_max_mom - cycle_min_mom) height

    and after the cycle, with n = (i + 1 - first - second) / decay_step_size, or 0 without a decay step size:

        lr     = cycle_min_lr / (1 + decay_lr_rate n)
        beta1  = cycle_max_mom (1 + decay_mom_rate n)

    As in DeepSpeed, beta2 is 0.99 while the momentum is cycled, the first optimizer step uses `cycle_min_mom`, and an
    optimizer without `betas` keeps its momentum, with a warning.

    Source: Smith, "A disciplined approach to neural network hyper-parameters: Part 1", arXiv:1803.09820.

    Raises:
        ValueError: `cycle_first_step_size` is not positive, `cycle_second_step_size` is negative, or a list does not
            match the parameter groups.
    """

    reports_initial_lr = False

    def __init__(
        self,
        optimizer: HasParamGroups,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self.first_size = float(cycle_first_step_size)
        self.second_size = self.first_size if cycle_second_step_size is None else float(cycle_second_step_size)
        if self.first_size <= 0 or self.second_size < 0:
            raise ValueError(
                f"cycle_first_step_size must be positive and cycle_second_step_size at least 0, got "
                f"{self.first_size:g} "
                f"and {self.second_size:g}"
            )
        self.first_stairs = cycle_first_stair_count
        self.second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_step_size = decay_step_size
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.min_lrs = per_group(optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = per_group(optimizer, cycle_max_lr, "cycle_max_lr")
        self.min_moms = per_group(optimizer, cycle_min_mom, "cycle_min_mom")
        self.max_moms = per_group(optimizer, cycle_max_mom, "cycle_max_mom")
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        if cycle_momentum and not self.cycle_momentum:
            logger.warning(
                "OneCycle: the optimizer has no betas, so its momentum is not cycled; set cycle_momentum false"
            )
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at `last_batch_iteration`."""
        if not self._in_cycle():
            return [least / (1 + self.decay_lr_rate * self._decay_intervals()) for least in self.min_lrs]
        height = self._cycle_position()
        return [least + (most - least) * height for least, most in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each group at `last_batch_iteration`, or None if the momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        if not self._in_cycle():
            return [(most * (1 + self.decay_mom_rate * self._decay_intervals()), 0.99) for most in self.max_moms]
        height = self._cycle_position()
        return [
            (most - (most - least) * height, 0.99) for least, most in zip(self.min_moms, self.max_moms, strict=True)
        ]

    def _write_lrs(self) -> list[float]:
        moms = self.get_mom() or []
        # as in DeepSpeed, the first step uses the minimum momentum although the cycle starts at the maximum
        if moms and self.last_batch_iteration < 0:
            moms = [(least, 0.99) for least in self.min_moms]
        for group, betas in zip(self.optimizer.param_groups, moms, strict=False):
            group["betas"] = betas
        return super()._write_lrs()

    def _in_cycle(self) -> bool:
        return self.last_batch_iteration < self.first_size + self.second_size

    def _cycle_position(self) -> float:
        length = self.first_size + self.second_size
        position = (self.last_batch_iteration + 1) % length
        rising = position <= self.first_size
        way, size = (position, self.first_size) if rising else (length - position, self.second_size)
        stairs = self.first_stairs if rising else self.second_stairs
        # Round `way * stairs / size`, not `(way / size) * stairs`: where the exact value is a whole number, the second
        # may be slightly less.
        return math.floor(way * stairs / size) / stairs if stairs > 0 else way / size

    def _decay_intervals(self) -> float:
        past = self.last_batch_iteration + 1 - (self.first_size + self.second_size)
        return past / self.decay_step_size if self.decay_step_size else 0.0
