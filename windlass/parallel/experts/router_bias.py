"""Load balancing without an auxiliary loss: each expert's score has a bias, which falls while the expert's load is
above the mean and rises while it is below (arXiv:2408.15664)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.comm.mesh_axis import MeshAxis

BIAS_BUFFERS = ("e_score_correction_bias",)
"""Buffer names of the bias in transformers, in routers whose outputs include the chosen experts."""


class RouterBias:
    """Bias of one router, and the number of tokens that chose each expert since the last update.

    The counts are not a buffer, because they differ between ranks and must not be synchronized as buffers are.

    Args:
        router: the router module.
        name: name of the bias buffer, `[experts]`.
        expert_bias_update_rate: step size of an update.
    """

    def __init__(self, router: nn.Module, name: str, expert_bias_update_rate: float) -> None:
        self._router, self.name, self.expert_bias_update_rate = router, name, expert_bias_update_rate
        self._token_counts: torch.Tensor | None = None

    @property
    def bias(self) -> torch.Tensor:
        """Current bias tensor, looked up at each access because buffers may be replaced."""
        found: torch.Tensor = getattr(self._router, self.name)
        return found

    @property
    def num_experts(self) -> int:
        return self.bias.numel()

    @torch.no_grad()
    def count_tokens(self, index: torch.Tensor) -> None:
        """Add the chosen experts to the counts. Values of `num_experts` or more are ignored."""
        chosen = count_tokens_per_expert(index, self.num_experts)
        self._token_counts = chosen if self._token_counts is None else self._token_counts + chosen

    def pop_counts(self) -> torch.Tensor:
        """Return the counts `[experts]` and reset them to zero."""
        requested, self._token_counts = self._token_counts, None
        return (
            torch.zeros(self.num_experts, dtype=torch.int64, device=self.bias.device)
            if requested is None
            else requested
        )

    @torch.no_grad()
    def update(self, token_counts: torch.Tensor) -> None:
        """Raise the bias of experts with fewer tokens than the mean, and lower the bias of experts with more."""
        bias = self.bias
        mean = token_counts.sum().to(torch.float64) / token_counts.numel()
        bias += self.expert_bias_update_rate * torch.sign(mean - token_counts).to(bias.dtype).view_as(bias)


def count_tokens_per_expert(index: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return `[experts]`, the number of occurrences of each expert in `index`.

    Values of `num_experts` or more are ignored; negative values are not allowed.
    """
    flat = index.reshape(-1).clamp(max=num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=index.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]


def enable_router_bias_updates(model: nn.Module, expert_bias_update_rate: float, *, required: bool = True) -> list[str]:
    """Let `update_router_biases` move the biases of transformers' routers (`e_score_correction_bias`), which are
    otherwise constant.

    The biases become fp32: 16 bits would round small steps away.

    Args:
        expert_bias_update_rate: step size of an update; DeepSeek-V3 used 0.001 (arXiv:2412.19437, 4.2).
        required: raise if no router has such a bias. False for a pipeline stage, which may have no router.

    Returns:
        Names of the routers.

    Raises:
        ModelError: no router has such a bias.
    """
    found = []
    for name, module in model.named_modules():
        owner = next(
            (attribute for attribute in BIAS_BUFFERS if isinstance(module._buffers.get(attribute), torch.Tensor)), None
        )
        if owner is None:
            continue
        found.append(name)
        setattr(module, owner, getattr(module, owner).float())
        if getattr(module, "_balance", None) is None:
            module._balance = RouterBias(module, owner, expert_bias_update_rate)
            module.register_forward_hook(_count_tokens)
        else:
            module._balance.expert_bias_update_rate = expert_bias_update_rate
    if not found and required:
        raise ModelError(
            f"{type(model).__name__} has no router with a buffer {' or '.join(BIAS_BUFFERS)} to update; "
            "leave out the bias update rate, or use a load-balancing loss"
        )
    return found


def update_router_biases(model: nn.Module, axes: Sequence[MeshAxis]) -> int:
    """Update each `RouterBias` of the model from the number of tokens that chose each expert on all ranks since the
    last update. Collective along `axes`.

    An engine does this after each applied step, and drops the counts of a step that is not applied. Without an engine,
    call it once after each optimizer step, with the axes that together form the data-parallel group of dense
    parameters.

    Returns:
        Number of updated routers.
    """
    balances = find_router_biases(model)
    update_biases(balances, axes)
    return len(balances)


def update_biases(biases: Sequence[RouterBias], axes: Sequence[MeshAxis]) -> None:
    """Update these biases, as `update_router_biases` does for a model. Collective along `axes`."""
    if not biases:
        return
    requested = torch.cat([balance.pop_counts() for balance in biases])
    for axis in axes:
        axis.all_reduce(requested)
    for balance, part in zip(biases, requested.split([balance.num_experts for balance in biases]), strict=True):
        balance.update(part)


def find_router_biases(model: nn.Module) -> list[RouterBias]:
    """Return the `RouterBias` of every router that has one."""
    found = (getattr(module, "_balance", None) for module in model.modules())
    return [one for one in found if isinstance(one, RouterBias)]


def is_router_bias(module: nn.Module, name: str) -> bool:
    """Return True if a buffer is a router bias that is updated. Such a buffer stays fp32 for any dtype of the model."""
    balance = getattr(module, "_balance", None)
    return isinstance(balance, RouterBias) and balance.name == name


def _count_tokens(module: nn.Module, args: Any, output: Any) -> None:
    if not module.training:
        return
    outputs = output if isinstance(output, (tuple, list)) else (output,)
    for one in reversed(outputs):
        if isinstance(one, torch.Tensor) and not one.is_floating_point() and one.dtype != torch.bool:
            module._balance.count_tokens(one)  # type: ignore[union-attr, operator]
            return
    raise ModelError(
        f"the router {type(module).__name__} returns no integer tensor of chosen experts, so its bias can't be "
        "updated; return the indices of the experts, or leave out the bias update rate"
    )
