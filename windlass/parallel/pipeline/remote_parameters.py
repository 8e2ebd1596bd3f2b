"""Removal of parameters of other pipeline ranks from optimizers and parameter lists."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch


def drop_remote_parameters(
    optimizer: Any, parameters: Iterable[Any] | None, remote_ids: Collection[int]
) -> tuple[Any, list[Any] | None]:
    """Remove parameters of other ranks from the `optimizer` and `parameters` arguments of `initialize`.

    Args:
        optimizer: a `torch.optim.Optimizer`, which is changed in place; any other object is returned unchanged.
        parameters: parameters, pairs of a name and a parameter, or parameter groups.
        remote_ids: ids of the parameters to remove.

    Returns:
        `(optimizer, parameters)`: the optimizer and the remaining parameters, None if `parameters` is None.
    """
    kept = (
        None
        if parameters is None
        else [_without_remote(one, remote_ids) for one in parameters if not _is_remote(one, remote_ids)]
    )
    if remote_ids and isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in remote_ids:
                    optimizer.state.pop(parameter, None)
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in remote_ids]
    return optimizer, kept


def _is_remote(given: Any, remote_ids: Collection[int]) -> bool:
    parameter = given[1] if isinstance(given, tuple) and len(given) == 2 else given
    return id(parameter) in remote_ids


def _without_remote(given: Any, remote_ids: Collection[int]) -> Any:
    if not isinstance(given, dict):
        return given
    params = given["params"]
    each = [params] if isinstance(params, torch.Tensor) else list(params)
    return {**given, "params": [one for one in each if not _is_remote(one, remote_ids)]}
