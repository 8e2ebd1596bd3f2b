"""Classes DeepSpeedCPUAdam, DeepSpeedCPUAdagrad and DeepSpeedCPULion: windlass's optimizers for host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from windlass.compat.optimizers.optimizer_refusal import OptimizerRefusal, check_adam
from windlass.optim.cpu_adagrad import CPUAdagrad
from windlass.optim.cpu_adam import CPUAdam
from windlass.optim.cpu_lion import CPULion


def _state_dtype(fp32_optimizer_states: bool) -> str:
    return "fp32" if fp32_optimizer_states else "bf16"


class DeepSpeedCPUAdam(CPUAdam):
    """Optimizer `windlass.optim.CPUAdam`.

    16-bit states (`fp32_optimizer_states=False`) are bf16 for every parameter dtype.

    Raises:
        OptimizerRefusal: `amsgrad` is True or `bias_correction` is False.
    """

    same_rule_as: ClassVar[type[torch.optim.Optimizer]] = CPUAdam

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_adam("DeepSpeedCPUAdam", amsgrad, bias_correction)
        self.adam_w_mode, self.fp32_optimizer_states = adamw_mode, fp32_optimizer_states
        super().__init__(
            model_params, lr, betas, eps, weight_decay, adamw_mode, state_dtype=_state_dtype(fp32_optimizer_states)
        )


class DeepSpeedCPUAdagrad(CPUAdagrad):
    """Optimizer `windlass.optim.CPUAdagrad`, which here accepts sparse gradients if there is no weight decay.

    `adamw_mode` is ignored; accelerate passes it to every class.

    Raises:
        OptimizerRefusal: `amsgrad` is True.
    """

    same_rule_as: ClassVar[type[torch.optim.Optimizer]] = CPUAdagrad

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        adamw_mode: bool | None = None,
    ) -> None:
        if amsgrad:
            raise OptimizerRefusal("DeepSpeedCPUAdagrad: amsgrad is true, and Adagrad has no such variant; delete it")
        self.fp32_optimizer_states = fp32_optimizer_states
        dtype = _state_dtype(fp32_optimizer_states)
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps, state_dtype=dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update like `CPUAdagrad.step`. Sparse gradients are made dense, because a zero gradient changes nothing.

        Raises:
            ModelError: see `CPUAdagrad.step`; or a sparse gradient with weight decay, which would decay untouched rows.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        without_decay = [p for group in self.param_groups if not group["weight_decay"] for p in group["params"]]
        sparse = [p for p in without_decay if p.grad is not None and p.grad.is_sparse]
        own = self.gradient_overrides
        self.gradient_overrides = {
            **own,
            **{p: p.grad.to_dense() for p in sparse if p not in own and p.grad is not None},
        }
        try:
            super().step()
        finally:
            self.gradient_overrides = own
        return loss


class DeepSpeedCPULion(CPULion):
    """Optimizer `windlass.optim.CPULion` with DeepSpeed's defaults. `adamw_mode` is ignored."""

    same_rule_as: ClassVar[type[torch.optim.Optimizer]] = CPULion

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
        adamw_mode: bool | None = None,
    ) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(model_params, lr, betas, weight_decay, state_dtype=_state_dtype(fp32_optimizer_states))
