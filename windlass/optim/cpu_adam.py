"""Adam and AdamW for parameters in host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from windlass.kernels.update_rules import AdamRule
from windlass.optim.cpu_optimizer import CPUOptimizer
from windlass.optim.hyperparameter_checks import check_hyperparameters


class CPUAdam(CPUOptimizer):
    """AdamW, or Adam with `adamw_mode=False`. The results equal those of torch's fused step (`docs/kernels.md`).

    Source: Kingma & Ba, arXiv:1412.6980; Loshchilov & Hutter, arXiv:1711.05101; Reddi et al., arXiv:1904.09237.

    State: `step` (0-d fp32), `exp_avg`, `exp_avg_sq`, with amsgrad `max_exp_avg_sq`; with 8-bit states also the scales
    `exp_avg_scale` etc., fp32 `[ceil(n / 256)]`.

    Args:
        adamw_mode: decouple the weight decay from the gradient.
        maximize: maximize the objective instead of minimizing it.
        state_dtype: "fp32", "bf16" or "8bit".
        fp32_optimizer_states: DeepSpeed's argument for the dtype of states: False replaces `state_dtype="fp32"` by
            "bf16".

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        amsgrad: bool = False,
        maximize: bool = False,
        state_dtype: str | torch.dtype = "fp32",
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_hyperparameters("CPUAdam", tuple(betas), lr=lr, eps=eps, weight_decay=weight_decay)
        if not fp32_optimizer_states and state_dtype in ("fp32", torch.float32):
            state_dtype = "bf16"
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": adamw_mode,
        }
        super().__init__(params, defaults, state_dtype)

    def _state_names(self, group: dict[str, Any]) -> tuple[tuple[str, bool], ...]:
        names = (("exp_avg", True), ("exp_avg_sq", False))
        return (*names, ("max_exp_avg_sq", False)) if group["amsgrad"] else names

    def _update_rule(self, group: dict[str, Any], step: int, is_first: bool) -> AdamRule:
        return AdamRule(
            lr=float(group["lr"]),
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            step=step,
        )
