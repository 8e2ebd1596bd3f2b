"""Functions `safe_get_full_fp32_param` etc.: weight, gradient and optimizer states of one parameter, from any tier.

Implemented by `windlass.zero.access.full_values` and `shard_values`. The functions of full values are collective: all
ranks must call them for the same parameters in the same order. A frozen parameter has no master weight and no state:
the functions return None, as in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from windlass.zero import parameter_registry
from windlass.zero.access import full_values, shard_values
from windlass.zero.sharded_init import initial_shard


def _is_trained(param: nn.Parameter) -> bool:
    return param.requires_grad and parameter_registry.find(param) is not None


@torch.no_grad()
def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the full master weight as a new tensor; None for a parameter that no engine trains."""
    if not _is_trained(param):
        return None
    return full_values.full_param(param).detach()


@torch.no_grad()
def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the full gradient, averaged over ranks, unclipped and without the loss scale; None if there is none.

    For a parameter without an engine, return its `.grad`, or None if the parameter is sharded.
    """
    if parameter_registry.find(param) is None:
        return None if initial_shard.find(param) is not None else param.grad
    return full_values.full_grad(param) if param.requires_grad else None


@torch.no_grad()
def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return the full optimizer state `optim_state_key` (`exp_avg`, ...); None if there is none (yet)."""
    return full_values.full_state(param, optim_state_key) if _is_trained(param) else None


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the full weight. Does nothing for a parameter that no engine trains.

    Raises:
        ModelError: the shape differs.
    """
    if _is_trained(param):
        full_values.set_full_param(param, value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the full gradient between backward and step. For a parameter without an engine, copy `value` into
    its `.grad`.

    Raises:
        ModelError: the shape differs, or there is no gradient.
    """
    if _is_trained(param):
        full_values.set_full_grad(param, value)
    elif param.grad is not None:
        param.grad.copy_(value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set the full optimizer state `optim_state_key`. Does nothing for a parameter that no engine trains."""
    if _is_trained(param):
        full_values.set_full_state(param, optim_state_key, value)


@torch.no_grad()
def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace each gradient by `update_func(gradient, parameter)`. Parameters without a gradient are skipped."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's shard of the master weight, flat; None for a parameter that no engine trains."""
    return shard_values.local_param(param) if _is_trained(param) else None


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's shard of the reduced gradient, flat, including the loss scale; None if there is none.

    Raises:
        ModelError: the optimizer reduces local gradients itself (1-bit updates), so there is no such shard.
    """
    return shard_values.local_grad(param) if _is_trained(param) else None


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's shard of the optimizer state `optim_state_key`; None if the state does not exist.

    The shard is empty if other ranks hold all elements of the parameter.
    """
    if not _is_trained(param):
        return None
    found = shard_values.local_state(param, optim_state_key)
    if found is None and not (piece := shard_values.local_param(param)).numel():
        return piece
    return found


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's shard of the weight. Collective: every rank sets its own shard."""
    if _is_trained(param):
        shard_values.set_local_param(param, value)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's shard of the reduced gradient."""
    if _is_trained(param):
        shard_values.set_local_grad(param, value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's shard of the optimizer state `optim_state_key`."""
    if _is_trained(param):
        shard_values.set_local_state(param, optim_state_key, value)
