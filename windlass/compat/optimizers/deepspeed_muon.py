"""Module `deepspeed.runtime.zero.muon`: windlass's Muon with DeepSpeed's class names, arguments and defaults."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from windlass.optim import muon

_MUON_DEFAULTS: dict[str, Any] = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0}
_ADAM_DEFAULTS: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0}


class Muon(muon.Muon):
    """Muon for matrices only. `ns_method` is ignored: the Newton-Schulz iteration is always used.

    Raises:
        ConfigError: a parameter has fewer than two dimensions.
    """

    same_rule_as: ClassVar[type[torch.optim.Optimizer]] = muon.Muon

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.02,
        weight_decay: float = 0,
        momentum: float = 0.95,
        ns_method: str = "gram",
    ) -> None:
        given: list[Any] = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        hidden = [{"use_muon": True, **group} for group in groups]
        super().__init__(hidden, lr=lr, weight_decay=weight_decay, momentum=momentum)


class MuonWithAuxAdam(muon.Muon):
    """Muon for the groups with `use_muon` True, AdamW for the others. Options are set in the groups.

    Raises:
        AssertionError: a group does not set `use_muon`.
    """

    same_rule_as: ClassVar[type[torch.optim.Optimizer]] = muon.Muon

    def __init__(self, param_groups: Iterable[dict[str, Any]]) -> None:
        groups = list(param_groups)
        assert all("use_muon" in group for group in groups), (
            "a parameter group lacks use_muon; set it to True or False in every group"
        )
        super().__init__([{**(_MUON_DEFAULTS if group["use_muon"] else _ADAM_DEFAULTS), **group} for group in groups])


SingleDeviceMuon, SingleDeviceMuonWithAuxAdam = Muon, MuonWithAuxAdam


@torch.no_grad()
def muon_update(
    grad: torch.Tensor,
    momentum: torch.Tensor,
    beta: float = 0.95,
    ns_steps: int = 5,
    nesterov: bool = True,
    ns_method: str = "gram",
    is_expert_group: bool = False,
    num_heads: int | None = None,
) -> torch.Tensor:
    """Return Muon's direction for a matrix or a stack of matrices, before the learning rate.

    Updates `momentum` in place. A gradient that is not finite is returned as it is, and leaves `momentum` unchanged.

    Args:
        grad: `[..., rows, columns]`. Four dimensions, those of a convolution, are flattened to one matrix `[first,
            rest]`, unless `is_expert_group`.
        momentum: running mean of the gradients, in the shape of `grad`.
        ns_method: ignored: the Newton-Schulz iteration is always used.
        is_expert_group: treat four dimensions as a stack of matrices instead.
        num_heads: number of attention heads along the rows of a matrix; each is orthogonalized by itself.

    Raises:
        ValueError: `num_heads` is set, and `grad` is not a matrix, or `num_heads` does not divide its rows.
    """
    finite = torch.isfinite(grad).all()
    momentum.copy_(torch.where(finite, momentum.lerp(grad, 1 - beta), momentum))
    matrices = grad.lerp(momentum, beta) if nesterov else momentum
    rows, columns = grad.shape[-2:]
    if num_heads is not None:
        if grad.ndim != 2 or num_heads < 1 or rows % num_heads:
            raise ValueError(f"muon_update: {num_heads} heads do not divide a gradient of shape {tuple(grad.shape)}")
        rows //= num_heads
        matrices = matrices.view(num_heads, rows, columns)
    elif grad.ndim == 4 and not is_expert_group:
        matrices = matrices.flatten(1)
    elif grad.ndim > 3:
        matrices = matrices.flatten(0, -3)
    update = muon.orthogonalize(matrices, muon.NS_COEFFICIENTS, ns_steps) * math.sqrt(max(1.0, rows / columns))
    return torch.where(finite, update.reshape(grad.shape).to(grad.dtype), grad)
