"""LAMB for parameters in host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from windlass.base.errors import ConfigError
from windlass.kernels.update_rules import LambRule
from windlass.optim.cpu_optimizer import CPUOptimizer
from windlass.optim.hyperparameter_checks import check_hyperparameters


class CPULamb(CPUOptimizer):
    """`windlass.optim.Lamb` in two passes over the data, the first for the norms.

    State: `step` (0-d fp32), `exp_avg`, `exp_avg_sq`.

    The trust ratio is computed over each full parameter, so a part of a parameter must not be stepped separately.
    Source: You et al., arXiv:1904.00962, algorithm 2; the order of operations is that of `windlass.optim.Lamb`.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        maximize: bool = False,
        state_dtype: str | torch.dtype = "fp32",
    ) -> None:
        check_hyperparameters("CPULamb", tuple(betas), lr=lr, eps=eps, weight_decay=weight_decay)
        if not 0 <= min_coeff <= max_coeff:
            raise ConfigError(f"CPULamb: need 0 <= min_coeff <= max_coeff, got {min_coeff} and {max_coeff}")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "maximize": maximize,
        }
        super().__init__(params, defaults, state_dtype)

    def _state_names(self, group: dict[str, Any]) -> tuple[tuple[str, bool], ...]:
        return (("exp_avg", True), ("exp_avg_sq", False))

    def _update_rule(self, group: dict[str, Any], step: int, is_first: bool) -> LambRule:
        return LambRule(
            lr=float(group["lr"]),
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            bias_correction=group["bias_correction"],
            eps_inside_sqrt=group["eps_inside_sqrt"],
            min_coeff=group["min_coeff"],
            max_coeff=group["max_coeff"],
            maximize=group.get("maximize", False),
            step=step,
        )
