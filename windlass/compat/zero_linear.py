"""Module `deepspeed.runtime.zero.linear`: the linear function that DeepSpeed substitutes for torch's at stage 3.

windlass does not need this function, because autograd never saves a sharded weight. windlass replaces
`torch.nn.functional.linear` only if the configuration has `memory_efficient_linear: true`, or `Init` without a
configuration gets `mem_efficient_linear=True`; in strict mode, as in DeepSpeed, these are the defaults. The function
then stays replaced for the rest of the process, as in DeepSpeed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.compat.accelerator.real_accelerator import get_accelerator
from windlass.compat.runtime_functions import noop_decorator

__all__ = [
    "LinearFunctionForZeroStage3",
    "LinearModuleForZeroStage3",
    "autocast_custom_bwd",
    "autocast_custom_fwd",
    "noop_decorator",
    "zero3_linear_wrap",
]

autocast_custom_fwd = functools.partial(torch.amp.custom_fwd, device_type=get_accelerator().device_name())
autocast_custom_bwd = functools.partial(torch.amp.custom_bwd, device_type=get_accelerator().device_name())


class LinearFunctionForZeroStage3(torch.autograd.Function):
    """Autograd function `input @ weight.T + bias`, whose backward runs under the autocast state of its forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product."""
        product: Tensor = torch._C._nn.linear(input, weight, bias)  # `F.linear` may be `zero3_linear_wrap`
        return product

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the operands and the autocast state."""
        device = get_accelerator().device_name()
        ctx._fwd_used_autocast, ctx._dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        input, weight, *rest = inputs
        ctx.has_bias = bool(rest) and rest[0] is not None
        ctx.save_for_backward(input, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of the operands that need one."""
        input, weight = ctx.saved_tensors
        enabled, dtype = ctx._fwd_used_autocast, ctx._dtype
        rows = grad.reshape(-1, grad.shape[-1])
        with torch.autocast(get_accelerator().device_name(), enabled=enabled, dtype=dtype):
            of_input = grad.matmul(weight) if ctx.needs_input_grad[0] else None
            of_weight = rows.t().matmul(input.reshape(-1, input.shape[-1])) if ctx.needs_input_grad[1] else None
            of_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias


def zero3_linear_wrap(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `input @ weight.T + bias`, computed by `LinearFunctionForZeroStage3`."""
    output: Tensor = LinearFunctionForZeroStage3.apply(input, weight, bias)
    return output


class InsertPostInitMethodToModuleSubClasses:
    """Base class of `deepspeed.zero.Init`.

    Attributes:
        linear_bk: torch's linear function before the replacement; absent until `replace_linear` is called.
    """

    linear_bk: ClassVar[Callable[..., Tensor]]


def replace_linear() -> None:
    """Replace `torch.nn.functional.linear` by `zero3_linear_wrap`, unless a script has replaced it."""
    kept = InsertPostInitMethodToModuleSubClasses
    if not hasattr(kept, "linear_bk"):
        kept.linear_bk = F.linear
    if F.linear is kept.linear_bk:
        F.linear = zero3_linear_wrap


class LinearModuleForZeroStage3(nn.Module):
    """Module like `nn.Linear`, computed by `LinearFunctionForZeroStage3`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize weight and bias as `nn.Linear` does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor) -> Tensor:
        """Return `input @ weight.T + bias`."""
        return zero3_linear_wrap(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return the sizes as text."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
