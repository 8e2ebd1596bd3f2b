"""Balancing without a loss: a bias on each expert's score that moves against its load (arXiv:2408.15664)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.comm.mesh_axis import MeshAxis

BIAS_BUFFERS = ("e_score_correction_bias",)
"""What transformers calls the bias: buffers of routers that return the chosen experts among their outputs."""


class RouterBias:
    """One router's bias and what its experts were asked for since the bias last moved.

    The counts are no buffer: each rank has its own, and nobody is to make them equal.

    Args:
        router: its module.
        name: of the buffer that is the bias, `[experts]`.
        rate: how far it moves at once.
    """

    def __init__(self, router: nn.Module, name: str, expert_bias_update_rate: float) -> None:
        self._router, self.name, self.expert_bias_update_rate = router, name, expert_bias_update_rate
        self._token_counts: torch.Tensor | None = None

    @property
    def bias(self) -> torch.Tensor:
        """As it is now: buffers may be moved."""
        found: torch.Tensor = getattr(self._router, self.name)
        return found

    @property
    def num_experts(self) -> int:
        return self.bias.numel()

    @torch.no_grad()
    def count_tokens(self, index: torch.Tensor) -> None:
        """Add what tokens chose; numbers that are no expert count for nothing."""
        chosen = count_tokens_per_expert(index, self.num_experts)
        self._token_counts = chosen if self._token_counts is None else self._token_counts + chosen

    def pop_counts(self) -> torch.Tensor:
        """`[experts]`, the counts, which start again from zero."""
        asked, self._token_counts = self._token_counts, None
        return torch.zeros(self.num_experts, dtype=torch.int64, device=self.bias.device) if asked is None else asked

    @torch.no_grad()
    def update(self, token_counts: torch.Tensor) -> None:
        """Move the bias of experts that were asked less than the mean up, of others down."""
        bias = self.bias
        mean = token_counts.sum().to(torch.float64) / token_counts.numel()
        bias += self.expert_bias_update_rate * torch.sign(mean - token_counts).to(bias.dtype).view_as(bias)


def count_tokens_per_expert(index: torch.Tensor, num_experts: int) -> torch.Tensor:
    """`[experts]`, how often each is in `index`; other numbers are left out."""
    flat = index.reshape(-1).clamp(max=num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=index.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]


def enable_router_bias_updates(model: nn.Module, expert_bias_update_rate: float, *, required: bool = True) -> list[str]:
    """Have `update_balance` move the biases of transformers' routers (`e_score_correction_bias`), which it keeps as
    they are. They are fp32 from now on: 16 bits would round small steps away.

    Args:
        rate: how far a bias moves in a step; DeepSeek-V3 took 0.001 (arXiv:2412.19437, 4.2).
        required: False: a model without such a bias is none to complain about (a stage of a pipeline).

    Returns:
        the names of the routers.

    Raises:
        ModelError: none has such a bias.
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
            module._balance.rate = expert_bias_update_rate
    if not found and required:
        raise ModelError(
            f"{type(model).__name__} has no router with a buffer {' or '.join(BIAS_BUFFERS)} that could be balanced; "
            "leave the rate of balancing out, or balance by a loss"
        )
    return found


def update_router_biases(model: nn.Module, axes: Sequence[MeshAxis]) -> int:
    """Move each balanced router's bias by what all ranks' tokens chose since the last time. Collective along `axes`.

    To be called once after each optimizer step, with axes that together make the data ranks of dense parameters.

    Returns:
        how many routers there are.
    """
    balances = find_router_biases(model)
    update_biases(balances, axes)
    return len(balances)


def update_biases(biases: Sequence[RouterBias], axes: Sequence[MeshAxis]) -> None:
    """As `update_balance`, of routers that were found before."""
    if not biases:
        return
    asked = torch.cat([balance.pop_counts() for balance in biases])
    for axis in axes:
        axis.all_reduce(asked)
    for balance, part in zip(biases, asked.split([balance.num_experts for balance in biases]), strict=True):
        balance.update(part)


def find_router_biases(model: nn.Module) -> list[RouterBias]:
    """Of every router whose bias moves."""
    found = (getattr(module, "_balance", None) for module in model.modules())
    return [one for one in found if isinstance(one, RouterBias)]


def is_router_bias(module: nn.Module, name: str) -> bool:
    """Whether a buffer is a bias that moves: such a one stays fp32 whatever the model computes in."""
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
        f"the router {type(module).__name__} returns no integers that say which experts it chose; "
        "its bias can't be balanced"
    )
