"""Base class of learning-rate schedules: counts iterations, writes rates into parameter groups, saves its position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

PerGroup = float | Sequence[float]
"""One number for all parameter groups, or one for each."""


class HasParamGroups(Protocol):
    """Optimizer with parameter groups that have an `lr`; schedules need nothing else."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class LRSchedule:
    """Learning rate as a function of `last_batch_iteration`, written into `param_groups` at every `step()`.

    Groups added later keep their own rate. Construction at iteration -1 writes the initial rates, which the first
    optimizer step uses. Construction at a later iteration (manual resume) writes nothing before the first `step()`.
    """

    reports_initial_lr = True  # True if get_last_lr() returns the initial rates before the first step()

    def __init__(self, optimizer: HasParamGroups, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None
        if last_batch_iteration < 0:
            first = self._write_lrs()
            self._last_lr = first if self.reports_initial_lr else None

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at `last_batch_iteration`."""
        raise NotImplementedError(f"{type(self).__name__} has no formula")

    def get_last_lr(self) -> list[float]:
        """Return the rates that the last `step()`, `load_state_dict` or the constructor wrote.

        Raises:
            AssertionError: `step()` was not called yet, in `OneCycle` or after a manual resume. Clients of DeepSpeed
                search for "need to call step" in the message.
        """
        if self._last_lr is None:
            raise AssertionError("need to call step() first: no learning rate has been computed yet")
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next iteration, or to the given one, and write its rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._last_lr = self._write_lrs()

    def state_dict(self) -> dict[str, int]:
        """Return the iteration. Everything else comes from the configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the saved iteration and write its rates."""
        self.last_batch_iteration = int(state["last_batch_iteration"])
        rates = self._write_lrs()
        self._last_lr = rates if self.last_batch_iteration >= 0 or self.reports_initial_lr else None

    def _write_lrs(self) -> list[float]:
        rates = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)  # a captured or compiled step holds a reference to this tensor
            else:
                group["lr"] = rate
        return rates


def per_group(optimizer: HasParamGroups, value: PerGroup, name: str) -> list[float]:
    """Expand `value` to one number for each group.

    Raises:
        ValueError: a list whose length differs from the number of groups.
    """
    count = len(optimizer.param_groups)
    if isinstance(value, int | float):
        return [float(value)] * count
    if len(value) != count:
        raise ValueError(f"expected {count} values for {name}, one for each parameter group, got {len(value)}")
    return [float(entry) for entry in value]


def positive_integer(value: int, name: str) -> int:
    """Return `value` if it is a positive integer.

    Raises:
        ValueError: `value` is not a positive integer.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value
