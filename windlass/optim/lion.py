"""Lion: the update is the sign of an interpolated momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from windlass.optim.hyperparameter_checks import check_hyperparameters
from windlass.optim.per_parameter_optimizer import PerParameterOptimizer


class Lion(PerParameterOptimizer):
    """Lion: c = b1 m + (1 - b1) g; w <- (1 - lr wd) w - lr sign(c); m <- b2 m + (1 - b2) g.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675, algorithm 2. State:
    `exp_avg`, of the parameter's shape and dtype. The update is elementwise, so any span of a parameter can be stepped
    separately.

    Raises:
        ConfigError: the learning rate or decay is negative, or a beta is outside [0, 1).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        check_hyperparameters("Lion", betas, lr=lr, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    def _update_parameter(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        exp_avg, (beta1, beta2) = state["exp_avg"], group["betas"]
        direction = exp_avg.mul(beta1).add_(grad, alpha=1 - beta1).sign_()
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction.mul_(group["lr"]), alpha=-1)
        exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)
