"""Adagrad for parameters in host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from windlass.kernels.update_rules import AdagradRule
from windlass.optim.cpu_optimizer import CPUOptimizer
from windlass.optim.hyperparameter_checks import check_hyperparameters


class CPUAdagrad(CPUOptimizer):
    """Adagrad. The results equal those of torch's fused step.

    State: `step` (0-d fp32), `sum`. Source: Duchi et al., JMLR 12.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        maximize: bool = False,
        state_dtype: str | torch.dtype = "fp32",
    ) -> None:
        check_hyperparameters(
            "CPUAdagrad",
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
        )
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
        }
        super().__init__(params, defaults, state_dtype)

    def _state_names(self, group: dict[str, Any]) -> tuple[tuple[str, bool], ...]:
        return (("sum", False),)

    def _initial_value(self, group: dict[str, Any]) -> float:
        return float(group["initial_accumulator_value"])

    def _update_rule(self, group: dict[str, Any], step: int, is_first: bool) -> AdagradRule:
        return AdagradRule(
            lr=float(group["lr"]),
            lr_decay=group["lr_decay"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            step=step,
        )
