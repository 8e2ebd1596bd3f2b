"""LAMB: Adam's direction, scaled for each parameter by a trust ratio."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from windlass.base.errors import ConfigError
from windlass.optim.hyperparameter_checks import check_hyperparameters
from windlass.optim.per_parameter_optimizer import PerParameterOptimizer

_PART = 1 << 17  # elements whose squares are summed at once on a CPU


class Lamb(PerParameterOptimizer):
    """LAMB with the argument names and the order of operations of DeepSpeed's FusedLamb.

    With Adam's moments m and v: u = m / (sqrt(v) + eps) + wd w; ratio = |w| / |u| clamped to [min_coeff, max_coeff], or
    1 if either norm is 0; w <- w - lr c ratio u. The bias correction c = sqrt(1 - b2^t) / (1 - b1^t) scales the step
    instead of the moments. This differs from the paper: there c cancels, here it is a warm-up of 1/(1 - b2) steps.
    Norms are those of one full parameter: sums of squares in fp64, whose roots are rounded to fp32. So a run that sums
    the squares of shards takes the same steps.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv:1904.00962,
    algorithm 2. State: `step` (0-d fp32), `exp_avg`, `exp_avg_sq`.

    Args:
        bias_correction: multiply the step by c.
        eps_inside_sqrt: divide by sqrt(v + eps) instead of sqrt(v) + eps.
        max_grad_norm: must be 0 (off); clipping by the norm of all gradients is done outside the optimizer.
        amsgrad: must be False.

    Raises:
        ConfigError: a value is out of range, or `max_grad_norm` or `amsgrad` is set.
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
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise ConfigError("Lamb: amsgrad is true, and LAMB has no AMSGrad variant; delete it")
        if max_grad_norm:
            raise ConfigError(f"Lamb: max_grad_norm is {max_grad_norm}; set the top-level gradient_clipping instead")
        check_hyperparameters(type(self).__name__, betas, lr=lr, eps=eps, weight_decay=weight_decay)
        if not 0 <= min_coeff <= max_coeff:
            raise ConfigError(f"Lamb: need 0 <= min_coeff <= max_coeff, got {min_coeff} and {max_coeff}")
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": tuple(betas),
                "eps": eps,
                "eps_inside_sqrt": eps_inside_sqrt,
                "weight_decay": weight_decay,
                "max_coeff": max_coeff,
                "min_coeff": min_coeff,
            },
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled or loaded state. Options that a group lacks have their defaults, and step counts may be
        plain numbers: groups of DeepSpeed's FusedLamb have no `eps_inside_sqrt`.
        """
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        for own in self.state.values():
            if "step" in own and not isinstance(own["step"], torch.Tensor):
                own["step"] = torch.tensor(float(own["step"]), dtype=torch.float32)

    def _update_parameter(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if group["eps_inside_sqrt"]:
            denominator = exp_avg_sq.add(group["eps"]).sqrt_()
        else:
            denominator = exp_avg_sq.sqrt().add_(group["eps"])
        update = exp_avg.div(denominator)
        if group["weight_decay"]:
            update.add_(parameter, alpha=group["weight_decay"])
        size = group["lr"]
        if group["bias_correction"]:
            t = state["step"].item()
            size *= (1 - beta2**t) ** 0.5 / (1 - beta1**t)
        ratio = self._ratio(parameter, update, group)
        parameter.sub_(update.mul_(ratio * size))

    def _ratio(self, parameter: torch.Tensor, update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return trust_ratio(parameter, update, group["min_coeff"], group["max_coeff"])


def trust_ratio(weight: torch.Tensor, update: torch.Tensor, least: float, most: float) -> torch.Tensor:
    """Return |weight| / |update| clamped to [least, most], or 1 if either norm is 0; a 0-d fp32 tensor, without a
    device sync.
    """
    return ratio_of_norms(sum_of_squares(weight).sqrt(), sum_of_squares(update).sqrt(), least, most)


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares as a 0-d fp64 tensor."""
    # On a CPU, vector_norm copies its whole input to fp64. Parts of _PART elements stay in the cache.
    parts = values.reshape(-1).split(_PART) if values.device.type == "cpu" else (values,)
    return torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]).square().sum()


def ratio_of_norms(weight: torch.Tensor, update: torch.Tensor, least: float, most: float) -> torch.Tensor:
    """Return `weight / update` of two norms, 0-d fp64 tensors, clamped as in `trust_ratio`, as a 0-d fp32 tensor."""
    weight_norm, update_norm = weight.float(), update.float()
    ratio = (weight_norm / update_norm).clamp(least, most)
    return torch.where((weight_norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio))
