"""Sharding of modules that hold experts as stacked tensors, and their forward with token dispatch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.experts.deepcopy_on_axis import deepcopy_on_axis
from windlass.parallel.experts.expert_dispatch import compute_expert_spans, dispatch_and_combine
from windlass.parallel.experts.expert_modules import ExpertModuleSpec, TokenRouting
from windlass.parallel.experts.grouped_linear import RowGroups
from windlass.parallel.narrow_to_ranges import narrow_to_ranges
from windlass.parallel.parameter_values import replace_values
from windlass.parallel.placement import get_placement, make_ranges_along, set_placement


class ExpertParallelForward:
    """Forward of an expert module that holds only this rank's experts. It replaces the module's own forward.

    Args:
        module: the module; its tensors contain only this rank's experts.
        spec: description of the module's experts.
        num_experts: number of experts on all ranks.
        axis: mesh axis over which the experts are distributed.
    """

    def __init__(self, module: nn.Module, spec: ExpertModuleSpec, num_experts: int, axis: MeshAxis) -> None:
        self.module, self.spec, self.num_experts, self.axis = module, spec, num_experts, axis
        self._original_forward: Callable[..., torch.Tensor] = module.forward
        self._signature = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden, index, weights = self._routing(args, kwargs)
        flat = hidden.reshape(-1, hidden.shape[-1])
        found = dispatch_and_combine(
            flat,
            index,
            weights,
            num_experts=self.num_experts,
            axis=self.axis,
            run_local_experts=self._run_local_experts,
            dropless=False,
        )
        return found.view(*hidden.shape[:-1], found.shape[-1])

    def _routing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenRouting:
        if self.spec.read_routing is not None:
            return self.spec.read_routing(self.num_experts, *args, **kwargs)
        given = self._signature.bind(*args, **kwargs).args if kwargs else args
        hidden, index, weights = given[:3]
        return hidden, index, weights

    def _run_local_experts(self, rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        if self.spec.run_rows is not None:
            return self.spec.run_rows(self.module, rows, groups)
        expert = groups.expert_of(rows)[:, None]
        found = self._original_forward(rows, expert, rows.new_ones(expert.shape)).view_as(rows) if len(rows) else rows
        return found + _zero_dependency(rows, self.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallelForward:
        """Deep-copy the forward and its module. The copy shares the mesh axis."""
        return deepcopy_on_axis(self, self.axis, memo)


def shard_stacked_experts(module: nn.Module, name: str, spec: ExpertModuleSpec, axis: MeshAxis) -> tuple[int, int]:
    """Keep only this rank's experts of a module, and return their range `[first, end)`.

    Args:
        name: name of the module, for errors.

    Raises:
        ModelError: a tensor cannot be divided into as many equal parts as there are experts, or another axis shards its
            first dimension.
    """
    experts = int(getattr(module, spec.count_attribute))
    first, end = compute_expert_spans(experts, axis)[axis.index]
    for parameter, grain in find_shardable_parameters(module, name, spec):
        before = get_placement(parameter)
        ranges = make_ranges_along(before.global_shape, 0, [(first * grain, end * grain)])[:1] + before.ranges[1:]
        replace_values(parameter, narrow_to_ranges(parameter.detach(), 0, [(first * grain, end * grain)]))
        set_placement(
            parameter, replace(before, ranges=ranges, sharded_axes=before.sharded_axes | {axis.name}, is_expert=True)
        )
    forward = ExpertParallelForward(module, spec, experts, axis)
    setattr(module, spec.count_attribute, end - first)
    module.forward = forward
    return first, end


def find_shardable_parameters(module: nn.Module, name: str, spec: ExpertModuleSpec) -> list[tuple[nn.Parameter, int]]:
    """Return the parameters to shard, each with its number of rows per expert.

    Raises:
        ModelError: a tensor cannot be divided into as many equal parts as there are experts, or another axis shards its
            first dimension.
    """
    experts = int(getattr(module, spec.count_attribute))
    found = []
    for tensor in spec.sharded_parameters(module):
        parameter = module.get_parameter(tensor)
        grain, rest = divmod(parameter.shape[0], experts)
        before = get_placement(parameter)
        if rest or not grain or before.ranges[0] != ((0, before.global_shape[0]),):
            raise ModelError(
                f"{name}.{tensor} of shape {tuple(before.global_shape)}, of which {parameter.shape[0]} rows are here, "
                f"can't be split into {experts} experts ({spec.count_attribute}); name the parameters to shard with "
                f"register_experts({type(module).__name__!r}, parameter_names=...)"
            )
        found.append((parameter, grain))
    return found


def _zero_dependency(rows: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Return a zero that depends on the rows and on all parameters in the autograd graph.

    The zero matters if no local expert has a row: without the zero, this rank would not take part in the backward's
    collectives, and its parameters would get no gradient.
    """
    zero = rows[:, :0].sum()
    for parameter in module.parameters():
        if parameter.requires_grad:
            zero = zero + parameter.reshape(-1)[:0].sum().to(zero.dtype)
    return zero
