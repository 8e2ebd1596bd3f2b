"""Predicates on expert parameters, and split of optimizer groups into dense and expert groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from windlass.parallel.experts import MixtureOfExperts
from windlass.parallel.placement import get_placement

OptimizerGroup = dict[str, Any]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether a model has an MoE layer, and the number of experts of the first one."""
    first = next((module for module in m.modules() if isinstance(module, MixtureOfExperts)), None)
    return first is not None, 0 if first is None else first.num_experts


def is_moe_param(param: torch.Tensor) -> bool:
    """Return True for an expert's parameter: it is marked `allreduce=False`, or it is sharded by expert parallelism."""
    if getattr(param, "allreduce", True) is False:
        return True
    return isinstance(param, nn.Parameter) and get_placement(param).is_expert


def is_autoep_expert_param(param: torch.Tensor) -> bool:
    """Return True for a sharded expert of a transformers model, i.e. one that is not in an `MoE` layer."""
    spread = isinstance(param, nn.Parameter) and get_placement(param).is_expert
    return spread and getattr(param, "allreduce", True) is not False


def is_moe_param_group(param_group: OptimizerGroup) -> bool:
    """Return True if an optimizer group is marked as a group of experts."""
    return bool(param_group.get("moe"))


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split parameters into dense parameters and expert parameters."""
    given = list(params)
    return [one for one in given if not is_moe_param(one)], [one for one in given if is_moe_param(one)]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[nn.Parameter],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the existing gradients of dense and of experts' parameters, in the parameters' dtypes."""
    shared, experts = split_params_into_shared_and_expert_params(p for p in group if p.grad is not None)
    return [p.grad.to(p.dtype) for p in shared if p.grad is not None], [
        p.grad.to(p.dtype) for p in experts if p.grad is not None
    ]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: OptimizerGroup | tuple[OptimizerGroup, ...] | list[OptimizerGroup],
    max_group_size: float | None = 178956971,
) -> list[OptimizerGroup]:
    """Move experts' parameters out of optimizer groups into new groups, appended to the list.

    The new groups have the same options, `moe: True` and the name of their process group. A list is changed in place
    and returned.

    Args:
        max_group_size: largest number of elements in a group of experts (a single larger parameter has a group of its
            own); None: unlimited.

    Raises:
        ValueError: the argument is neither a group nor a sequence of groups.
    """
    if not isinstance(param_groups, (dict, tuple, list)):
        raise ValueError(
            f"param_groups is a {type(param_groups).__name__}; give an optimizer's group, or a list of them"
        )
    groups = [param_groups] if isinstance(param_groups, dict) else param_groups
    groups = groups if isinstance(groups, list) else list(groups)
    made: list[OptimizerGroup] = []
    for group in groups:
        group["params"], experts = split_params_into_shared_and_expert_params(group["params"])
        named: dict[str, list[nn.Parameter]] = {}
        for parameter in experts:
            named.setdefault(getattr(parameter, "group_name", "experts"), []).append(parameter)
        for name, parameters in named.items():
            made += [
                {**group, "name": name, "moe": True, "params": part}
                for part in _split_by_size(parameters, max_group_size)
            ]
    groups += made
    return groups


def _split_by_size(parameters: list[nn.Parameter], limit: float | None) -> list[list[nn.Parameter]]:
    parts: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in parameters:
        if parts[-1] and limit is not None and size + parameter.numel() > limit:
            parts.append([])
            size = 0
        parts[-1].append(parameter)
        size += parameter.numel()
    return parts


def configure_moe_param_groups(model_parameters: list[Any]) -> list[OptimizerGroup]:
    """Split parameters or groups as `split_params_into_different_moe_groups_for_optimizer` does.

    Groups that are already split are returned unchanged.

    Raises:
        TypeError: an item is neither a parameter nor a group.
    """
    for one in model_parameters:
        if not isinstance(one, (torch.Tensor, dict)):
            raise TypeError(f"an optimizer's parameters are tensors, or groups as dicts, not a {type(one).__name__}")
    if model_parameters and isinstance(model_parameters[0], torch.Tensor):
        dense = {"params": model_parameters, "name": "dense-params"}
        return split_params_into_different_moe_groups_for_optimizer(dense)
    if any("moe" in group for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)
