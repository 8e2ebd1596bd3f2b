"""Base class of optimizers in plain PyTorch that step each parameter separately."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from windlass.base.errors import ModelError


class PerParameterOptimizer(torch.optim.Optimizer):
    """Base of `Lion` and `Lamb`. A subclass implements the update of one parameter."""

    @abstractmethod
    def _update_parameter(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        """Update `parameter` and its state in place with the dense gradient `grad`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. Return the result of `closure`.

        Raises:
            ModelError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_parameter(parameter, self._require_dense(parameter.grad), group)
        return loss

    def _require_dense(self, grad: torch.Tensor) -> torch.Tensor:
        if grad.is_sparse:
            owner, shape = type(self).__name__, tuple(grad.shape)
            raise ModelError(f"{owner}: the gradient of a parameter of shape {shape} is sparse; make it dense")
        return grad
