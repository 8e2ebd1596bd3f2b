"""Classes DeepSpeedCPUAdam, DeepSpeedCPUAdagrad and DeepSpeedCPULion: windlass's optimizers for host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from windlass.base.errors import ModelError
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

    @torch.no_grad()
    def step_subgroup(self, subgroup_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameter that has a gradient, with the states at `state[subgroup_id]`.

        Callers put the parameter of one subgroup at a time into `param_groups`.

        Returns:
            Result of `closure`.

        Raises:
            ModelError: more than one parameter has a gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = self._subgroup_parameter()
        if found is not None:
            group, parameter = found
            own = self.state.pop(parameter, None)
            self.state[parameter] = self.state[subgroup_id]  # type: ignore[index]
            try:
                self._step_group({**group, "params": [parameter]}, 1.0)
            finally:
                del self.state[parameter]
                if own is not None:
                    self.state[parameter] = own
        return loss

    @torch.no_grad()
    def rollback_subgroup(self, sub_group_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Undo the last `step_subgroup` of a subgroup: parameter, moments and step count.

        The parameter must still have the gradient of that step. The inverse is computed in fp32, so values return up to
        rounding.

        Returns:
            Result of `closure`.

        Raises:
            RuntimeError: the subgroup has no states, or its step count is 0.
            ModelError: more than one parameter has a gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        state = self.state.get(sub_group_id, {})  # type: ignore[call-overload]
        if "exp_avg" not in state:
            raise RuntimeError(
                f"Cannot rollback optimizer state for sub_group_id {sub_group_id}: it has none; call step_subgroup "
                "first"
            )
        if state["step"] <= 0:
            raise RuntimeError(f"Cannot rollback sub_group_id {sub_group_id}: step count is {int(state['step'])}")
        found = self._subgroup_parameter()
        if found is not None:
            _undo_adam(*found, state)
            state["step"] -= 1
        return loss

    def _subgroup_parameter(self) -> tuple[dict[str, Any], torch.Tensor] | None:
        """Return the parameter that has a gradient and its group, or None."""
        found = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if len(found) > 1:
            raise ModelError(
                f"DeepSpeedCPUAdam: {len(found)} parameters have gradients, and a subgroup has the states of one; put "
                "one parameter into the groups at a time"
            )
        return found[0] if found else None


def _undo_adam(group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
    """Invert one step of Adam or AdamW in place, except its step count."""
    (beta1, beta2), lr, decay, step = group["betas"], float(group["lr"]), group["weight_decay"], float(state["step"])
    first, second = state["exp_avg"].float(), state["exp_avg_sq"].float()
    assert parameter.grad is not None
    gradient, values = parameter.grad.float(), parameter.float()
    size = lr / (1 - beta1**step)
    values = values + size * first / ((second / (1 - beta2**step)).sqrt() + group["eps"])
    if group["decoupled_weight_decay"]:
        values = values / (1 - lr * decay)
    else:
        gradient = gradient + decay * values
    if step > 1:
        first = (first - (1 - beta1) * gradient) / beta1
        second = ((second - (1 - beta2) * gradient.square()) / beta2).clamp_(min=0)
    else:  # the moments began as zeros, so they return to zeros without rounding
        first, second = torch.zeros_like(first), torch.zeros_like(second)
    parameter.copy_(values)
    state["exp_avg"].copy_(first)
    state["exp_avg_sq"].copy_(second)


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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of DeepSpeed's, which names the sum of squares `exp_avg_sq`."""
        states = {
            number: {"sum" if name == "exp_avg_sq" else name: value for name, value in state.items()}
            for number, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": states})

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
