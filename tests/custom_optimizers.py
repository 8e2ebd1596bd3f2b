"""Optimizers of users, defined by their update rule alone."""

from __future__ import annotations

from typing import Any

import torch


class Foreign(torch.optim.Optimizer):
    """Optimizer that updates each parameter with a gradient by `rule`, which subclasses define."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def rule(self, p: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        """Update `p` in place."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.rule(p, p.grad, self.state[p], group["lr"])
