"""SGD for parameters in host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from windlass.base.errors import ConfigError
from windlass.kernels.update_rules import SGDRule
from windlass.optim.cpu_optimizer import CPUOptimizer
from windlass.optim.hyperparameter_checks import check_hyperparameters


class CPUSGD(CPUOptimizer):
    """SGD. The results equal those of torch's fused step. State: `momentum_buffer`, if momentum is not 0.

    Raises:
        ConfigError: a value is out of range, or `nesterov` is set without momentum or with dampening.
    """

    _has_step_count = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        state_dtype: str | torch.dtype = "fp32",
    ) -> None:
        check_hyperparameters("CPUSGD", lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ConfigError(
                f"CPUSGD: nesterov needs a momentum and no dampening; they are {momentum} and {dampening}"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, state_dtype)

    def _state_names(self, group: dict[str, Any]) -> tuple[tuple[str, bool], ...]:
        return (("momentum_buffer", True),) if group["momentum"] else ()

    def _update_rule(self, group: dict[str, Any], step: int, is_first: bool) -> SGDRule:
        return SGDRule(
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=is_first,
        )
