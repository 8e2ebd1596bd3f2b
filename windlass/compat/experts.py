"""Questions about experts that are spread over ranks: here there are none, and the answers are no."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from windlass.compat.refusal import NotBuiltError


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a model has layers whose experts are spread, and how many experts."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether a parameter is one of an expert's, by the mark that such parameters carry."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether an optimizer's group is one of experts, by its mark."""
    return bool(param_group.get("moe"))


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters that are everybody's, and those of experts."""
    given = list(params)
    return [one for one in given if not is_moe_param(one)], [one for one in given if is_moe_param(one)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """The groups of an optimizer, as a list: experts would get groups of their own.

    Raises:
        ValueError: neither a group nor several.
        NotBuiltError: there are experts among them.
    """
    if not isinstance(param_groups, (dict, tuple, list)):
        raise ValueError(
            f"param_groups is a {type(param_groups).__name__}; give an optimizer's group, or a list of them"
        )
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for group in groups:
        group["params"], experts = split_params_into_shared_and_expert_params(group["params"])
        if experts:
            raise NotBuiltError(
                "experts over ranks (MoE) are not built yet; use the model's own, which every stage trains"
            )
    return groups


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """As `split_params_into_different_moe_groups_for_optimizer`, of parameters or of groups."""
    if model_parameters and isinstance(model_parameters[0], torch.Tensor):
        return split_params_into_different_moe_groups_for_optimizer(
            {"params": model_parameters, "name": "dense-params"}
        )
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)
