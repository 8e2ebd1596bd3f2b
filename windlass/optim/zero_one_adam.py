"""0/1 Adam: Adam that sends one bit for each element and updates its variance at growing intervals. Later it takes
local steps without any message."""

from __future__ import annotations

from enum import Enum
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from windlass.base.errors import ConfigError
from windlass.optim.hyperparameter_checks import check_hyperparameters
from windlass.optim.one_bit_adam import (
    FREEZE_STEP,
    check_equal_in_groups,
    check_max_update,
    check_one_bit_options,
    check_sync_interval,
    keep_options,
    require_bias_correction,
)


class StepKind(Enum):
    """Kinds of steps, see [Note: 0/1 schedule]."""

    EXACT = "a step of AdamW"
    VARIANCE = "a step with reduced gradients, which updates the variance"
    COMPRESSED = "a step with compressed gradients"
    LOCAL = "a step without messages"
    SYNC = "a step that synchronizes the local steps before it"


class ZeroOneAdam(torch.optim.AdamW):
    """0/1 Adam. This class holds groups and hyper-parameters; an engine takes the steps
    (`zero/update/zero_one_adam_update`).

    [Note: 0/1 schedule] Until `var_freeze_step`, step s updates the variance with reduced gradients if s is a multiple
    of the interval, which begins with 1 and doubles after every `var_update_scaler` such steps; the other steps are
    compressed. At the interval 1 steps are AdamW's. After `var_freeze_step`, step s synchronizes if it is a multiple of
    the local interval, which begins with 1 and doubles after every `local_step_scaler` steps, up to
    `local_step_clipper`; the other steps are local. Outside an engine every step is AdamW's. Groups may have a mask of
    momenta, as those of `OneBitAdam`.

    Source: Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", arXiv:2202.06009,
    algorithm 1, with DeepSpeed's policies.

    Args:
        bias_correction, max_update: as in `OneBitAdam`. `max_update` bounds every step whose gradients are not reduced
            in full; at stage 0 a synchronization moves an element by at most as much as bounded steps would.
        sync_interval: as in `OneBitAdam`.
        eps_inside_sqrt, max_grad_norm, amsgrad: must have their defaults.
        cuda_aware, comm_backend_name: accepted for DeepSpeed's configurations, without effect.

    Raises:
        ConfigError: an option that AdamW lacks is out of range, or an option is not supported.
        ValueError: an option of AdamW is out of range.
    """

    same_rule_as: ClassVar[type[torch.optim.Optimizer]] = torch.optim.AdamW

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        var_freeze_step: int = FREEZE_STEP,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        max_update: float | None = None,
        sync_interval: int | None = None,
    ) -> None:
        check_hyperparameters("ZeroOneAdam", betas, lr=lr, eps=eps, weight_decay=weight_decay)
        check_one_bit_options(
            "ZeroOneAdam", var_freeze_step, max_grad_norm, amsgrad, eps_inside_sqrt=eps_inside_sqrt,
            key="var_freeze_step",
        )  # fmt: skip
        policies = {
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
        }
        for name, value in policies.items():
            if value < 1:
                raise ConfigError(f"ZeroOneAdam: {name} is {value}; write at least 1")
        check_max_update("ZeroOneAdam", max_update)
        check_sync_interval("ZeroOneAdam", sync_interval)
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        kept = {"var_freeze_step": var_freeze_step, **policies, "bias_correction": bias_correction}
        keep_options(self, {**kept, "max_update": max_update, "sync_interval": sync_interval, "applied_steps": 0})
        check_equal_in_groups(self, ("var_freeze_step", *policies, "sync_interval"))

    def step(self, closure: Any = None) -> Any:
        """Take a step of AdamW.

        Raises:
            ConfigError: `bias_correction` is false.
        """
        require_bias_correction(self)
        return super().step(closure)


def kind_of_step(step: int, group: dict[str, Any]) -> StepKind:
    """Return the kind of step `step`, counted from 1; see [Note: 0/1 schedule]."""
    if step > group["var_freeze_step"]:
        return StepKind.SYNC if step % _local_interval(step, group) == 0 else StepKind.LOCAL
    interval, last = 1, 0  # current interval, and the last step of the previous interval
    while True:
        first = last // interval * interval + interval
        end = first + (group["var_update_scaler"] - 1) * interval
        if step <= end:
            if interval == 1:
                return StepKind.EXACT
            return StepKind.VARIANCE if step >= first and step % interval == 0 else StepKind.COMPRESSED
        interval, last = 2 * interval, end


def steps_since_sync(step: int, group: dict[str, Any]) -> int:
    """Return the number of steps that a synchronization at `step` covers, including `step`."""
    first = step
    while first - 1 > group["var_freeze_step"] and kind_of_step(first - 1, group) is StepKind.LOCAL:
        first -= 1
    return step - first + 1


def _local_interval(step: int, group: dict[str, Any]) -> int:
    doublings: int = (step - group["var_freeze_step"] - 1) // group["local_step_scaler"]
    limit: int = group["local_step_clipper"]
    return min(limit, 1 << min(doublings, 30))
