"""Balancing without a loss: a bias on each expert's score that moves against its load (arXiv:2408.15664)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.comm.axis import Axis

BIASES = ("e_score_correction_bias",)
"""What transformers calls the bias: buffers of routers that return the chosen experts among their outputs."""


class Balance:
    """One router's bias and what its experts were asked for since the bias last moved.

    The counts are no buffer: each rank has its own, and nobody is to make them equal.

    Args:
        router: its module.
        name: of the buffer that is the bias, `[experts]`.
        rate: how far it moves at once.
    """

    def __init__(self, router: nn.Module, name: str, rate: float) -> None:
        self._router, self.name, self.rate = router, name, rate
        self._asked: torch.Tensor | None = None

    @property
    def bias(self) -> torch.Tensor:
        """As it is now: buffers may be moved."""
        found: torch.Tensor = getattr(self._router, self.name)
        return found

    @property
    def experts(self) -> int:
        return self.bias.numel()

    @torch.no_grad()
    def count(self, index: torch.Tensor) -> None:
        """Add what tokens chose; numbers that are no expert count for nothing."""
        chosen = chosen_of(index, self.experts)
        self._asked = chosen if self._asked is None else self._asked + chosen

    def take(self) -> torch.Tensor:
        """`[experts]`, the counts, which start again from zero."""
        asked, self._asked = self._asked, None
        return torch.zeros(self.experts, dtype=torch.int64, device=self.bias.device) if asked is None else asked

    @torch.no_grad()
    def move(self, asked: torch.Tensor) -> None:
        """Move the bias of experts that were asked less than the mean up, of others down."""
        bias = self.bias
        mean = asked.sum().to(torch.float64) / asked.numel()
        bias += self.rate * torch.sign(mean - asked).to(bias.dtype).view_as(bias)


def chosen_of(index: torch.Tensor, experts: int) -> torch.Tensor:
    """`[experts]`, how often each is in `index`; other numbers are left out."""
    flat = index.reshape(-1).clamp(max=experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=index.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:experts]


def watch_balance(model: nn.Module, rate: float, *, required: bool = True) -> list[str]:
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
            (attribute for attribute in BIASES if isinstance(module._buffers.get(attribute), torch.Tensor)), None
        )
        if owner is None:
            continue
        found.append(name)
        setattr(module, owner, getattr(module, owner).float())
        if getattr(module, "_balance", None) is None:
            module._balance = Balance(module, owner, rate)
            module.register_forward_hook(_count)
        else:
            module._balance.rate = rate
    if not found and required:
        raise ModelError(
            f"{type(model).__name__} has no router with a buffer {' or '.join(BIASES)} that could be balanced; "
            "leave the rate of balancing out, or balance by a loss"
        )
    return found


def update_balance(model: nn.Module, axes: Sequence[Axis]) -> int:
    """Move each balanced router's bias by what all ranks' tokens chose since the last time. Collective along `axes`.

    To be called once after each optimizer step, with axes that together make the data ranks of dense parameters.

    Returns:
        how many routers there are.
    """
    balances = balances_of(model)
    move_all(balances, axes)
    return len(balances)


def move_all(balances: Sequence[Balance], axes: Sequence[Axis]) -> None:
    """As `update_balance`, of routers that were found before."""
    if not balances:
        return
    asked = torch.cat([balance.take() for balance in balances])
    for axis in axes:
        axis.all_reduce(asked)
    for balance, part in zip(balances, asked.split([balance.experts for balance in balances]), strict=True):
        balance.move(part)


def balances_of(model: nn.Module) -> list[Balance]:
    """Of every router whose bias moves."""
    found = (getattr(module, "_balance", None) for module in model.modules())
    return [one for one in found if isinstance(one, Balance)]


def is_bias(module: nn.Module, name: str) -> bool:
    """Whether a buffer is a bias that moves: such a one stays fp32 whatever the model computes in."""
    balance = getattr(module, "_balance", None)
    return isinstance(balance, Balance) and balance.name == name


def _count(module: nn.Module, args: Any, output: Any) -> None:
    if not module.training:
        return
    outputs = output if isinstance(output, (tuple, list)) else (output,)
    for one in reversed(outputs):
        if isinstance(one, torch.Tensor) and not one.is_floating_point() and one.dtype != torch.bool:
            module._balance.count(one)  # type: ignore[union-attr, operator]
            return
    raise ModelError(
        f"the router {type(module).__name__} returns no integers that say which experts it chose; "
        "its bias can't be balanced"
    )
