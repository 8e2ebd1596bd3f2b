"""Full weights that pass their gradient on to the sharded parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class UseFullParameter(torch.autograd.Function):
    """Autograd function whose output is the full value of a parameter.

    Its backward returns the gradient of the full value, cast to the parameter's dtype, as the parameter's gradient.
    """

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, whole: list[torch.Tensor]) -> torch.Tensor:
        ctx.dtype = parameter.dtype
        # `whole` is in a list, because autograd turns an input tensor that `forward` returns into a view, and the
        # caller could not change this view in place.
        return whole[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].to(ctx.dtype), None


def differentiable_full(parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """Return `whole` as a tensor that depends on `parameter` in the autograd graph.

    Return `whole` itself if gradients are disabled, or if `parameter` or `whole` cannot have a gradient.
    """
    if not (torch.is_grad_enabled() and parameter.requires_grad and whole.is_floating_point()):
        return whole
    used: torch.Tensor = UseFullParameter.apply(parameter, [whole])
    return used
