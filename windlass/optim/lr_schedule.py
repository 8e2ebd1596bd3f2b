"""What every learning-rate schedule does: count iterations, write rates into parameter groups, save its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

PerGroup = float | Sequence[float]
"""One number for all parameter groups, or one for each."""


class HasParamGroups(Protocol):
    """What a schedule needs of an optimizer: groups with an `lr`."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class LRSchedule:
    """A learning rate as a function of `last_batch_iteration`, written into `param_groups` at every `step()`.

    Groups that are added later keep the rate that they come with.

    Construction at iteration -1 writes the starting rates, which the first optimizer step uses; construction at a later
    iteration (resuming by hand) writes nothing before the first `step()`.
    """

    reports_initial_lr = True  # whether the starting rates count as written ones: `get_last_lr` gives them

    def __init__(self, optimizer: HasParamGroups, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None
        if last_batch_iteration < 0:
            first = self._write_lrs()
            self._last_lr = first if self.reports_initial_lr else None

    def get_lr(self) -> list[float]:
        """The rate of each group at `last_batch_iteration`."""
        raise NotImplementedError(f"{type(self).__name__} has no formula")

    def get_last_lr(self) -> list[float]:
        """The rates that the last `step()` (or `load_state_dict`, or the construction) wrote.

        Raises:
            AssertionError: there was none; clients of DeepSpeed look for "need to call step" in its text.
        """
        if self._last_lr is None:
            raise AssertionError("need to call step() first: no learning rate has been computed yet")
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to the one given, and write its rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._last_lr = self._write_lrs()

    def state_dict(self) -> dict[str, int]:
        """The iteration; everything else is the configuration's."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to the saved iteration and write its rates."""
        self.last_batch_iteration = int(state["last_batch_iteration"])
        rates = self._write_lrs()
        self._last_lr = rates if self.last_batch_iteration >= 0 or self.reports_initial_lr else None

    def _write_lrs(self) -> list[float]:
        rates = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)  # a captured or compiled step holds on to this very tensor
            else:
                group["lr"] = rate
        return rates


def per_group(optimizer: HasParamGroups, value: PerGroup, name: str) -> list[float]:
    """`value` as one number for each group.

    Raises:
        ValueError: a list of another length than the groups.
    """
    count = len(optimizer.param_groups)
    if isinstance(value, int | float):
        return [float(value)] * count
    if len(value) != count:
        raise ValueError(f"expected {count} values for {name}, one for each parameter group, got {len(value)}")
    return [float(entry) for entry in value]


def positive_integer(value: int, name: str) -> int:
    """`value`, checked.

    Raises:
        ValueError: it is anything but a positive integer.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value
