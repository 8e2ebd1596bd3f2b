"""A whole weight through which gradients flow back to the parameter whose values are spread over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class UseFullParameter(torch.autograd.Function):
    """The identity from a parameter to its whole value: what a graph sees of a parameter that has no values here.

    The gradient is one more summand of the parameter's own, so that it is reduced with what its modules give it.
    """

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, whole: list[torch.Tensor]) -> torch.Tensor:
        ctx.dtype = parameter.dtype
        return whole[0]  # as an argument of its own, the output would be a view that must not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].to(ctx.dtype), None


def differentiable_full(parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """`whole`, as a tensor that depends on `parameter` where a graph is being built."""
    if not (torch.is_grad_enabled() and parameter.requires_grad and whole.is_floating_point()):
        return whole
    used: torch.Tensor = UseFullParameter.apply(parameter, [whole])
    return used
