"""Optimizers unknown to windlass, written by their rule alone."""

from __future__ import annotations

from typing import Any

import torch


class Foreign(torch.optim.Optimizer):
    """Steps each parameter that has a gradient by `rule`; where a subclass's rule leaves it, `state` is its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def rule(self, p: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        """Change `p` in place."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.rule(p, p.grad, self.state[p], group["lr"])
