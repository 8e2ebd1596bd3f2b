"""Experts of which each rank has some features: every token goes through its experts on all ranks, in parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.autograd_collectives import copy_to_parallel_region, reduce_from_parallel_region

_SIZE_ATTRIBUTES = ("intermediate_size", "intermediate_dim", "expert_dim", "moe_intermediate_size", "ffn_dim")


def fit_experts_to_local_features(
    module: nn.Module, axis: MeshAxis, full_size: int, local_size: int, bias: str | None
) -> None:
    """Have a module of experts whose weights are cut add up what the ranks computed.

    What goes in enters: hidden states, and the weights of each token's experts, whose gradient is a sum over features
    too. The hooks go around whatever else the module was given, such as an exchange of tokens with other ranks.

    Args:
        whole, here: features of one expert in all, and on this rank.
        bias: the name of the outputs' bias, which counts once: on the first rank.
    """
    for name in _SIZE_ATTRIBUTES:
        if vars(module).get(name) == full_size:
            setattr(module, name, local_size)
    if bias is not None and axis.index > 0:
        once = FirstRankBias(bias)
        module.register_forward_pre_hook(once.pre_forward, prepend=True)
        module.register_forward_hook(once.post_forward, always_call=True)
    module.register_forward_pre_hook(ExpertsInputHook(axis), prepend=True, with_kwargs=True)
    module.register_forward_hook(ExpertsReduceHook(axis))


class ExpertsInputHook:
    """Before experts: all numbers that gradients go back to enter."""

    def __init__(self, axis: MeshAxis) -> None:
        self._axis = axis

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(self._copy_to_region(arg) for arg in args), {
            name: self._copy_to_region(arg) for name, arg in kwargs.items()
        }

    def _copy_to_region(self, arg: Any) -> Any:
        return (
            copy_to_parallel_region(arg, self._axis)
            if isinstance(arg, torch.Tensor) and arg.is_floating_point()
            else arg
        )


class ExpertsReduceHook:
    """After experts: the sum over the ranks."""

    def __init__(self, axis: MeshAxis) -> None:
        self._axis = axis

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return reduce_from_parallel_region(output, self._axis)


class FirstRankBias:
    """Around experts: their outputs' bias is nothing here. It is seen by the name of the parameter, before that."""

    def __init__(self, name: str) -> None:
        self._name = name

    def pre_forward(self, module: nn.Module, args: Any) -> None:
        bias = module._parameters[self._name]
        assert bias is not None
        vars(module)[self._name] = bias * 0  # with a gradient, of zeros: every rank takes part in its sum

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        vars(module).pop(self._name, None)


class DivideByRanksHook:
    """After what is the same on all ranks and will be added up over them: this rank's share."""

    def __init__(self, axis: MeshAxis) -> None:
        self._axis = axis

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output / self._axis.size
