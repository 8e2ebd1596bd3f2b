"""DeepSpeedCPUAdam, DeepSpeedCPUAdagrad and DeepSpeedCPULion: windlass' optimizers for host memory."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.optim.optimizer import ParamsT

from windlass.compat.optimizers.refused import OptimizerRefusal, check_adam
from windlass.optim.cpu_adagrad import CPUAdagrad
from windlass.optim.cpu_adam import CPUAdam
from windlass.optim.cpu_lion import CPULion


def _state_dtype(fp32_optimizer_states: bool) -> str:
    return "fp32" if fp32_optimizer_states else "bf16"


class DeepSpeedCPUAdam(CPUAdam):
    """`windlass.optim.CPUAdam`. States in 16 bits (`fp32_optimizer_states=False`) are bf16, whatever the parameters.

    Raises:
        OptimizerRefusal: `amsgrad`, or no `bias_correction`.
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
    """`windlass.optim.CPUAdagrad`. `adamw_mode` says nothing to it: accelerate passes it to every class.

    Raises:
        OptimizerRefusal: `amsgrad`.
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


class DeepSpeedCPULion(CPULion):
    """`windlass.optim.CPULion` with DeepSpeed's defaults. `adamw_mode` says nothing to it, as to Adagrad."""

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
