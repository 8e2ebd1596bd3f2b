"""Experts of which each rank has some features: every token goes through its experts on all ranks, in parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.comm.axis import Axis
from windlass.parallel.exchanges import enter, leave

_SIZES = ("intermediate_size", "intermediate_dim", "expert_dim", "moe_intermediate_size", "ffn_dim")


def adapt_experts(module: nn.Module, axis: Axis, whole: int, here: int, bias: str | None) -> None:
    """Have a module of experts whose weights are cut add up what the ranks computed.

    What goes in enters: hidden states, and the weights of each token's experts, whose gradient is a sum over features
    too. The hooks go around whatever else the module was given, such as an exchange of tokens with other ranks.

    Args:
        whole, here: features of one expert in all, and on this rank.
        bias: the name of the outputs' bias, which counts once: on the first rank.
    """
    for name in _SIZES:
        if vars(module).get(name) == whole:
            setattr(module, name, here)
    if bias is not None and axis.index > 0:
        once = BiasOnce(bias)
        module.register_forward_pre_hook(once.before, prepend=True)
        module.register_forward_hook(once.after, always_call=True)
    module.register_forward_pre_hook(ExpertsInput(axis), prepend=True, with_kwargs=True)
    module.register_forward_hook(ExpertsOutput(axis))


class ExpertsInput:
    """Before experts: all numbers that gradients go back to enter."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(self._enter(arg) for arg in args), {name: self._enter(arg) for name, arg in kwargs.items()}

    def _enter(self, arg: Any) -> Any:
        return enter(arg, self._axis) if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg


class ExpertsOutput:
    """After experts: the sum over the ranks."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return leave(output, self._axis)


class BiasOnce:
    """Around experts: their outputs' bias is nothing here. It is seen by the name of the parameter, before that."""

    def __init__(self, name: str) -> None:
        self._name = name

    def before(self, module: nn.Module, args: Any) -> None:
        bias = module._parameters[self._name]
        assert bias is not None
        vars(module)[self._name] = bias * 0  # with a gradient, of zeros: every rank takes part in its sum

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        vars(module).pop(self._name, None)


class Share:
    """After what is the same on all ranks and will be added up over them: this rank's share."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output / self._axis.size
