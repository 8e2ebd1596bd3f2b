"""1-bit LAMB: LAMB whose messages have one bit for each element once its variance is frozen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from windlass.base.errors import ConfigError
from windlass.optim.lamb import Lamb, trust_ratio
from windlass.optim.one_bit_adam import (
    FREEZE_STEP,
    check_equal_in_groups,
    check_one_bit_options,
    check_sync_interval,
    keep_options,
)


class OneBitLamb(Lamb):
    """1-bit LAMB. This class holds groups and hyper-parameters; an engine takes the steps
    (`zero/update/one_bit_lamb_update`).

    The first `freeze_step` steps are those of `Lamb`, and keep a moving average of each trust ratio as `coeff_freeze`.
    Afterwards the variance is constant, and the trust ratio of a step is this average times a factor. The factor
    follows the largest quotient of two denominators of LAMB: one with the frozen variance, the other with a variance
    that is computed from the compressed momenta. Outside an engine every step is LAMB's. Groups may have a mask of
    momenta, as those of `OneBitAdam`.

    Source: Li et al., "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's Convergence
    Speed", arXiv:2104.06069, algorithm 2.

    Args:
        freeze_step: number of steps before the variance is frozen.
        coeff_beta: decay of the moving average of trust ratios.
        factor_max, factor_min: bounds of the factor.
        factor_threshold: maximum relative change of the factor in a step.
        sync_interval: as in `OneBitAdam`.
        cuda_aware, comm_backend_name: accepted for DeepSpeed's configurations, without effect.

    Raises:
        ConfigError: a value is out of range or not supported.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        freeze_step: int = FREEZE_STEP,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        sync_interval: int | None = None,
    ) -> None:
        check_one_bit_options("OneBitLamb", freeze_step, max_grad_norm, amsgrad)
        check_sync_interval("OneBitLamb", sync_interval)
        if not 0 <= coeff_beta < 1 or not 0 < factor_min <= factor_max or factor_threshold <= 0:
            raise ConfigError(
                f"OneBitLamb: coeff_beta {coeff_beta} must be in [0, 1), factor_min {factor_min} above 0 and at most "
                f"factor_max {factor_max}, and factor_threshold {factor_threshold} above 0"
            )
        super().__init__(
            params, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay, max_coeff=max_coeff,
            min_coeff=min_coeff,
        )  # fmt: skip
        kept = {
            "freeze_step": freeze_step,
            "coeff_beta": coeff_beta,
            "factor_max": factor_max,
            "factor_min": factor_min,
            "factor_threshold": factor_threshold,
            "sync_interval": sync_interval,
            "applied_steps": 0,
        }
        keep_options(self, kept)
        check_equal_in_groups(self, ("sync_interval",))

    def _ratio(self, parameter: torch.Tensor, update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        ratio = trust_ratio(parameter, update, group["min_coeff"], group["max_coeff"])
        state = self.state[parameter]
        if "coeff_freeze" not in state:
            state["coeff_freeze"] = torch.zeros((), dtype=torch.float32, device=ratio.device)
        state["coeff_freeze"].mul_(group["coeff_beta"]).add_(ratio, alpha=1 - group["coeff_beta"])
        return ratio


def take_lamb_momentum(
    values: torch.Tensor, momentum: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
) -> torch.Tensor:
    """Update the state of a parameter in place with the new common momentum.

    Args:
        values, momentum: values and momentum of the full parameter or of one of its parts, in float32.

    Returns:
        `[3]` in float64: the sum of squares of the update without weight decay, the same with weight decay, and the
        largest quotient of the frozen and the current denominator. The caller combines the results of a parameter's
        parts: it adds the first two, and takes the maximum of the third.
    """
    beta1, beta2 = group["betas"]
    if "exp_avg" not in state:  # first gradient after the freeze: the variance stays 0
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(values), torch.zeros_like(values)
    if "exp_avg_sq_fresh" not in state:
        state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
        state["variance_steps"] = torch.tensor(float(state["step"]))
        state["last_factor"] = torch.ones((), dtype=torch.float32, device=values.device)
        state.setdefault("coeff_freeze", torch.ones((), dtype=torch.float32, device=values.device))
    state["step"] += 1
    fresh = state["exp_avg_sq_fresh"]
    gradient = (momentum - state["exp_avg"] * beta1) / (1 - beta1)
    fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    state["exp_avg"].copy_(momentum)
    if not values.numel():
        return torch.zeros(3, dtype=torch.float64, device=values.device)
    plain = _frozen_update(state, group)
    update = plain.add(values, alpha=group["weight_decay"]) if group["weight_decay"] else plain
    largest = (lamb_denominator(state["exp_avg_sq"], group) / lamb_denominator(fresh, group)).max()
    squares = [torch.linalg.vector_norm(one, dtype=torch.float64).square() for one in (plain, update)]
    return torch.stack([*squares, largest.double()])


def move_lamb_values(
    values: torch.Tensor, state: dict[str, Any], group: dict[str, Any], numbers: Sequence[float]
) -> None:
    """Update the weight of a parameter, or of one of its parts, in place.

    Args:
        numbers: combined result of `take_lamb_momentum` for the full parameter.
    """
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    plain, update, largest = numbers
    share = min(1.0, (plain / update) ** 0.5) if decay and update else 1.0
    wanted = state["last_factor"].new_tensor(largest * share + 1 - share)
    factor = state["last_factor"] = next_factor(wanted, state["last_factor"], group)
    size = float(group["lr"])
    if group["bias_correction"]:
        seen = float(state["variance_steps"])
        size *= (1 - beta2**seen) ** 0.5 / (1 - beta1 ** float(state["step"]))
    move = _frozen_update(state, group)
    if decay:
        move.add_(values, alpha=decay)
    values.sub_(move.mul_(state["coeff_freeze"] * factor * size))


def _frozen_update(state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
    """Return the update without weight decay. It is 0 for elements that had no gradient before the freeze."""
    variance: torch.Tensor = state["exp_avg_sq"]
    update: torch.Tensor = state["exp_avg"] / lamb_denominator(variance, group)
    return update.masked_fill_(variance == 0, 0.0)


def next_factor(factor: torch.Tensor, last: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Return `factor` within its bounds, and changed by at most `factor_threshold` relative to `last`."""
    change = group["factor_threshold"]
    factor = factor.clamp(group["factor_min"], group["factor_max"])
    return torch.minimum(torch.maximum(factor, last * (1 - change)), last * (1 + change))


def lamb_denominator(variance: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Return sqrt(variance) + eps, or sqrt(variance + eps) with `eps_inside_sqrt`."""
    if group["eps_inside_sqrt"]:
        return variance.add(group["eps"]).sqrt_()
    return variance.sqrt().add_(group["eps"])
