"""`safe_get_full_fp32_param` and its kin: one parameter's weight, gradient and state, wherever they rest.

`windlass.zero.access.full_values` does the work. Collective, as there: all ranks call them for the same parameters in the same
order. A parameter that is frozen has no master weight and no state: None, as in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from windlass.zero.access import full_values, shard_values
from windlass.zero.core import parameter_registry
from windlass.zero.sharded_init import initial_shard


def _is_trained(param: nn.Parameter) -> bool:
    return param.requires_grad and parameter_registry.find(param) is not None


@torch.no_grad()
def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The whole master weight as a new tensor; None for a parameter that no engine trains."""
    if not _is_trained(param):
        return None
    return full_values.full_param(param).detach()


@torch.no_grad()
def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The whole gradient, averaged over ranks, not clipped, loss scale removed; None if there is none. Of a parameter
    without an engine, its `.grad`."""
    if parameter_registry.find(param) is None:
        return None if initial_shard.find(param) is not None else param.grad
    return full_values.full_grad(param) if param.requires_grad else None


@torch.no_grad()
def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """The whole optimizer state of that name (`exp_avg`, ...); None before the first step, or if there is none."""
    return full_values.full_state(param, optim_state_key) if _is_trained(param) else None


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole weight; nothing for a parameter that no engine trains.

    Raises:
        ModelError: another shape.
    """
    if _is_trained(param):
        full_values.set_full_param(param, value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the whole gradient between backward and step; without an engine, copy it into `.grad`.

    Raises:
        ModelError: another shape, or there is no gradient.
    """
    if _is_trained(param):
        full_values.set_full_grad(param, value)
    elif param.grad is not None:
        param.grad.copy_(value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set the whole optimizer state of that name; nothing for a parameter that no engine trains."""
    if _is_trained(param):
        full_values.set_full_state(param, optim_state_key, value)


@torch.no_grad()
def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace each gradient by what `update_func(gradient, parameter)` makes of it; those without one are skipped."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's piece of the master weight, flat."""
    return shard_values.local_param(param) if _is_trained(param) else None


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's piece of the reduced gradient, flat, loss scale included; None if there is none."""
    return shard_values.local_grad(param) if _is_trained(param) else None


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's piece of the optimizer state of that name; empty where other ranks have it all; None if there is
    none."""
    if not _is_trained(param):
        return None
    found = shard_values.local_state(param, optim_state_key)
    if found is None and not (piece := shard_values.local_param(param)).numel():
        return piece
    return found


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's piece of the weight. Collective: every rank sets its own."""
    if _is_trained(param):
        shard_values.set_local_param(param, value)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's piece of the reduced gradient."""
    if _is_trained(param):
        shard_values.set_local_grad(param, value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's piece of the optimizer state of that name."""
    if _is_trained(param):
        shard_values.set_local_state(param, optim_state_key, value)
