"""1-bit Adam: Adam whose messages have one bit for each element once its variance is frozen."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from windlass.base.errors import ConfigError
from windlass.optim.hyperparameter_checks import check_hyperparameters

FREEZE_STEP = 100_000
MOMENTUM_MASK = "exp_avg_mask"
"""Key of a parameter group whose value excludes elements from compressed steps; see `OneBitAdam`."""


class OneBitAdam(torch.optim.AdamW):
    """1-bit Adam. This class holds groups and hyper-parameters; an engine takes the steps
    (`zero/update/one_bit_adam_update`).

    The first `freeze_step` steps are those of `torch.optim.AdamW`. Afterwards the variance is constant, gradients are
    no longer reduced in full, and ranks exchange one bit for each element. Outside an engine every step is AdamW's.

    A group may have the key `exp_avg_mask`, a tensor with as many elements as each parameter of the group. In
    compressed steps momenta are multiplied by it. It is 0 for elements whose gradient is always 0, which one bit cannot
    represent. Checkpoints do not contain it, because it may differ between runs.

    Without `bias_correction` moments are used as they are, in all steps; an engine is needed then.

    Source: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
    arXiv:2102.02888.

    Args:
        freeze_step: number of steps before the variance is frozen.
        bias_correction: divide the moments by one minus the powers of their decays. DeepSpeed's class never does.
        max_update: bound of |m| / (sqrt(v) + eps) of each element in the compressed steps, with bias correction; None:
            unbounded, as in the paper. Steps of Adam rarely exceed 1. A variance that was frozen early underestimates
            many elements, whose steps are then far too large ([Note: bounded steps]).
        sync_interval: at ZeRO stages 1 and 2 the parameters of all ranks lag a little behind the sharded master
            weights. After every `sync_interval` steps an uncompressed all-gather makes them equal; None: only a save
            and `finish_update` do.
        eps_inside_sqrt, max_grad_norm, amsgrad: must have their defaults.
        cuda_aware, comm_backend_name: accepted for DeepSpeed's configurations, without effect: messages take the
            engine's transport.

    Raises:
        ConfigError: an option that AdamW lacks is out of range, or an option is not supported.
        ValueError: an option of AdamW is out of range.
    """

    same_rule_as: ClassVar[type[torch.optim.Optimizer]] = torch.optim.AdamW

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
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        max_update: float | None = None,
        sync_interval: int | None = None,
    ) -> None:
        check_hyperparameters("OneBitAdam", betas, lr=lr, eps=eps, weight_decay=weight_decay)
        check_one_bit_options("OneBitAdam", freeze_step, max_grad_norm, amsgrad, eps_inside_sqrt=eps_inside_sqrt)
        check_max_update("OneBitAdam", max_update)
        check_sync_interval("OneBitAdam", sync_interval)
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        options = {"freeze_step": freeze_step, "bias_correction": bias_correction, "max_update": max_update}
        keep_options(self, {**options, "sync_interval": sync_interval, "applied_steps": 0})
        check_equal_in_groups(self, ("sync_interval",))

    def step(self, closure: Any = None) -> Any:
        """Take a step of AdamW.

        Raises:
            ConfigError: `bias_correction` is false.
        """
        require_bias_correction(self)
        return super().step(closure)


def keep_options(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
    """Add options that torch's class lacks to the optimizer's defaults, and to each group that does not set them."""
    for group in optimizer.param_groups:
        for key, value in options.items():
            group.setdefault(key, value)
    optimizer.defaults |= options


def check_one_bit_options(
    name: str,
    freeze_step: int,
    max_grad_norm: float,
    amsgrad: bool,
    *,
    eps_inside_sqrt: bool = False,
    key: str = "freeze_step",
) -> None:
    """Raise ConfigError if `freeze_step`, called `key` in the message, is below 1, or if an unsupported option
    (any other argument) is set."""
    if freeze_step < 1:
        raise ConfigError(
            f"{name}: {key} is {freeze_step}, and the variance is measured in the steps before it; write at "
            "least 1, about 15 % of all steps"
        )
    if max_grad_norm:
        raise ConfigError(f"{name}: max_grad_norm is {max_grad_norm}; set the top-level gradient_clipping instead")
    if amsgrad:
        raise ConfigError(f"{name}: amsgrad is true, and a frozen variance has no maximum to keep; delete it")
    if eps_inside_sqrt:
        raise ConfigError(f"{name}: eps_inside_sqrt is true, and its steps are AdamW's; write false")


def check_max_update(name: str, max_update: float | None) -> None:
    """Raise ConfigError if `max_update`, the bound of steps, is not positive. None is allowed."""
    if max_update is not None and not max_update > 0:
        raise ConfigError(
            f"{name}: max_update is {max_update}; write a positive number, e.g. 1.0, or null for no bound"
        )


def check_sync_interval(name: str, interval: int | None) -> None:
    """Raise ConfigError if `sync_interval` is not positive. None is allowed."""
    if interval is not None and interval < 1:
        raise ConfigError(f"{name}: sync_interval is {interval}; write a number of steps, e.g. 1000, or null for none")


def is_sync_due(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if `sync_interval` divides the number of the step that was applied last."""
    interval = optimizer.param_groups[0].get("sync_interval")
    return interval is not None and applied_steps(optimizer) % int(interval) == 0


def corrects_bias(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if all groups have bias correction."""
    return all(group.get("bias_correction", True) for group in optimizer.param_groups)


def require_bias_correction(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if an optimizer without bias correction is stepped outside an engine."""
    if not corrects_bias(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__}: bias_correction is false, which only an engine steps; pass the optimizer to "
            "windlass.initialize, or write true"
        )


def applied_steps(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of optimizer steps applied so far: the largest count of all parameter groups."""
    return max((int(group.get("applied_steps", 0)) for group in optimizer.param_groups), default=0)


def count_step(optimizer: torch.optim.Optimizer) -> None:
    """Count one applied step in every group."""
    steps = applied_steps(optimizer) + 1
    for group in optimizer.param_groups:
        group["applied_steps"] = steps


def count_earlier_steps(optimizer: torch.optim.Optimizer, steps: int) -> bool:
    """Count the steps of another optimizer whose states were loaded, so that no warm-up begins again.

    Returns:
        True if the steps were counted. False if the optimizer counts no steps, or is `OneBitLamb`: its warm-up must
        measure average trust ratios, which the states of other optimizers lack.
    """
    counts = all("applied_steps" in group and "coeff_beta" not in group for group in optimizer.param_groups)
    for group in optimizer.param_groups if counts else ():
        group["applied_steps"] = steps
    return counts


def is_frozen(optimizer: torch.optim.Optimizer, key: str = "freeze_step") -> bool:
    """Return True if the next step is compressed. All groups freeze together, after the largest `freeze_step`."""
    last: Any = max((group[key] for group in optimizer.param_groups), default=0)
    return applied_steps(optimizer) >= int(last)


def check_equal_in_groups(optimizer: torch.optim.Optimizer, names: tuple[str, ...]) -> None:
    """Raise ConfigError if groups differ in one of the options `names`, which must be equal in all groups."""
    first = optimizer.param_groups[0]
    for number, group in enumerate(optimizer.param_groups):
        for name in names:
            if group[name] != first[name]:
                raise ConfigError(
                    f"{type(optimizer).__name__}: {name} is {group[name]} in group {number} of the parameters and "
                    f"{first[name]} in group 0, and all parameters take part in the same messages; delete it from the "
                    "groups, and write it in optimizer.params"
                )
