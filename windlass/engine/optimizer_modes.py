"""`train()` and `eval()` of optimizers that have other weights for an evaluation than for the training, e.g.
schedule-free ones (Defazio et al. 2024, https://arxiv.org/abs/2405.15682).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from windlass.zero import parameter_registry
from windlass.zero.access.full_values import full_param, full_states, set_full_param, set_full_state
from windlass.zero.access.shard_values import set_plain_state
from windlass.zero.update.elementwise_update import clone_optimizer
from windlass.zero.update.optimizer_step_session import NOT_SHARED


def modes_of(optimizer: torch.optim.Optimizer) -> dict[str, Callable[..., None]]:
    """Return replacements of the methods `train` and `eval` by name; empty if the optimizer's class lacks one.

    The states of a sharded optimizer are not in `optimizer.state`. So the methods of its class would change the weights
    of no parameter, or of this rank's alone.
    """
    if not all(callable(getattr(type(optimizer), name, None)) for name in ("train", "eval")):
        return {}
    return {name: partial(call_mode, optimizer, name) for name in ("train", "eval")}


@torch.no_grad()
def call_mode(optimizer: torch.optim.Optimizer, name: str, *args: Any, **kwargs: Any) -> None:
    """Call the method `name` of the optimizer's class for each full parameter, one at a time, with its full states.
    Collective.

    Parameters without states are left out. So are all parameters if the method, called without any, replaces no option
    of a group and no attribute of the optimizer: the mode is set already.

    Args:
        args, kwargs: arguments of the method.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(parameter_registry.find(parameter) is not None for parameter in parameters):
        getattr(type(optimizer), name)(optimizer, *args, **kwargs)  # the engine was destroyed
        return
    options = [_without_parameters(group) for group in optimizer.param_groups]

    def call(number: int, tensors: dict[torch.Tensor, dict[str, Any]]) -> torch.optim.Optimizer:
        inner = clone_optimizer(optimizer)
        inner.param_groups = [{**one, "params": [*tensors] if n == number else []} for n, one in enumerate(options)]
        inner.state = defaultdict(dict, tensors)
        getattr(type(inner), name)(inner, *args, **kwargs)
        return inner

    called = call(0, {})
    new_options = [_without_parameters(group) for group in called.param_groups]
    new_attributes = {key: value for key, value in called.__dict__.items() if key not in NOT_SHARED}
    pairs = zip([*new_options, new_attributes], [*options, optimizer.__dict__], strict=True)
    if all(value is old.get(key) for new, old in pairs for key, value in new.items()):
        return
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter_registry.find(parameter) is None or not (states := full_states(parameter)):
                continue
            before = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in states.items()}
            tensor = nn.Parameter(full_param(parameter))
            for key, value in call(number, {tensor: states}).state[tensor].items():
                if not isinstance(value, torch.Tensor):
                    if value != before.get(key):
                        set_plain_state(parameter, key, value)
                elif key not in before or not torch.equal(value, before[key]):
                    set_full_state(parameter, key, value)
            set_full_param(parameter, tensor.detach())
    for group, new in zip(optimizer.param_groups, new_options, strict=True):
        group.update(new)
    optimizer.__dict__.update(new_attributes)


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
