"""Experts sharded along their features: every rank computes a part of each expert for every token."""

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
    """Hook a module of experts with sharded weights so that it sums the outputs over the ranks.

    Inputs pass through `copy_to_parallel_region`: the hidden states, and the router's weights of each token, whose
    gradient is a sum over features too. The hooks wrap all other hooks of the module, such as a dispatch of tokens to
    other ranks.

    Args:
        full_size, local_size: number of features of one expert in total, and on this rank.
        bias: name of the output bias, which only the first rank adds; None: no bias.
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
    """Pre-forward hook of experts: pass all floating-point inputs through `copy_to_parallel_region`."""

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
    """Forward hook of experts: sum the outputs over the ranks."""

    def __init__(self, axis: MeshAxis) -> None:
        self._axis = axis

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return reduce_from_parallel_region(output, self._axis)


class FirstRankBias:
    """Hooks that replace the experts' output bias by zeros during the forward, on all ranks but the first. An instance
    attribute shadows the bias parameter during this time.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def pre_forward(self, module: nn.Module, args: Any) -> None:
        bias = module._parameters[self._name]
        assert bias is not None
        # keep the bias in the graph: every rank takes part in the sum of its gradient
        vars(module)[self._name] = bias * 0

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        vars(module).pop(self._name, None)


class DivideByRanksHook:
    """Forward hook of a replicated output that is later summed over the ranks: divide it by the number of ranks."""

    def __init__(self, axis: MeshAxis) -> None:
        self._axis = axis

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output / self._axis.size
