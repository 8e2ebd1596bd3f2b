"""Lion for parameters in host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from windlass.kernels.update_rules import LionRule
from windlass.optim.cpu_optimizer import CPUOptimizer
from windlass.optim.hyperparameter_checks import check_hyperparameters


class CPULion(CPUOptimizer):
    """`windlass.optim.Lion` in one pass. State: `exp_avg`. Source: Chen et al., arXiv:2302.06675, algorithm 2.

    Raises:
        ConfigError: a value is out of range.
    """

    _has_step_count = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
        state_dtype: str | torch.dtype = "fp32",
    ) -> None:
        check_hyperparameters("CPULion", tuple(betas), lr=lr, weight_decay=weight_decay)
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, state_dtype)

    def _state_names(self, group: dict[str, Any]) -> tuple[tuple[str, bool], ...]:
        return (("exp_avg", True),)

    def _update_rule(self, group: dict[str, Any], step: int, is_first: bool) -> LionRule:
        return LionRule(float(group["lr"]), tuple(group["betas"]), group["weight_decay"], group.get("maximize", False))
