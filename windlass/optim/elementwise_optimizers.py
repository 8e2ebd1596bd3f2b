"""Which optimizers may be run on any flat span of a parameter, and which have a fused step to use."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from functools import lru_cache
from typing import Any

import torch

from windlass.optim.cpu_adagrad import CPUAdagrad
from windlass.optim.cpu_adam import CPUAdam
from windlass.optim.cpu_lion import CPULion
from windlass.optim.cpu_optimizer import CPUOptimizer
from windlass.optim.cpu_sgd import CPUSGD
from windlass.optim.lion import Lion

_ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.ASGD,
        torch.optim.Rprop,
        Lion,
        CPUAdam,
        CPUAdagrad,
        CPULion,
        CPUSGD,
    }
)
_PROBE_ELEMENTS = 4096  # elements: whole blocks of states that are kept in blocks
SCALAR_STATES = frozenset({"step", "eta", "mu", "mu_product"})
"""What these rules keep as one number a parameter; anything else has an element for each of the parameter's."""

_FUSED: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.Adagrad,
)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether stepping flat spans of a parameter one by one gives what stepping the whole of it gives.

    The exact class counts: a subclass may look at a whole tensor where its parent does not, unless it says itself
    that it does not (`rule_of`).
    """
    return get_step_class(optimizer) in _ELEMENTWISE


def get_step_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The class whose step `optimizer` takes: its own, or the one that its own names in `same_rule_as`."""
    own = type(optimizer)
    rule: type[torch.optim.Optimizer] = vars(own).get("same_rule_as", own)
    return rule


def enable_fused_step(optimizer: torch.optim.Optimizer) -> bool:
    """Turn on torch's fused step in every group where it exists and the user chose no implementation.

    A user's choice is any of `fused`, `foreach`, `capturable`, `differentiable`, or a learning rate that is a tensor.
    `step` counters that already exist move to where the fused kernel reads them.

    Returns:
        Whether every group has a fused step now.
    """
    cls: Any = get_step_class(optimizer)
    if cls not in _FUSED:
        return False
    for group in optimizer.param_groups:
        if _allows_fused_step(group) and all(_has_fused_kernel(cls, *kind) for kind in _device_dtypes(group)):
            group["fused"] = True
            _move_counters(optimizer, group)
    return _all_fused(optimizer)


def supports_grad_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step()` heeds tensors `grad_scale` and `found_inf` set on `optimizer`, as `torch.amp.GradScaler` does.

    Both are one-element fp32 tensors on the parameters' device: gradients are divided by `grad_scale` (and written back
    so), and where `found_inf` is 1 nothing is updated, moments and `step` included. Only fused steps read them.
    """
    return isinstance(optimizer, CPUOptimizer) or get_step_class(optimizer) in _FUSED and _all_fused(optimizer)


def measure_state_bytes(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> int:
    """Bytes an element of the states that an elementwise optimizer keeps for a parameter of `dtype`, of the group that
    keeps most; found by stepping a few elements under it."""
    most = 0
    for group in optimizer.param_groups:
        probe = torch.zeros(_PROBE_ELEMENTS, dtype=dtype, requires_grad=True)
        probe.grad = torch.zeros_like(probe)
        twin: Any = object.__new__(type(optimizer))
        twin.__dict__.update(optimizer.__dict__)
        twin.__dict__.pop("step", None)  # a scheduler's, which would step the original
        twin.state, twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = (
            defaultdict(dict),
            OrderedDict(),
            OrderedDict(),
        )
        plain = {key: False for key in ("capturable", "fused") if group.get(key)}
        twin.param_groups = [{**group, **plain, "params": [probe]}]
        twin.step()
        states = [value for value in twin.state[probe].values() if isinstance(value, torch.Tensor) and value.dim()]
        most = max(most, -(-sum(state.numel() * state.element_size() for state in states) // _PROBE_ELEMENTS))
    return most


def _all_fused(optimizer: torch.optim.Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def _allows_fused_step(group: dict[str, Any]) -> bool:
    implementation_open = group.get("fused") is None and group.get("foreach") is None
    special = group.get("differentiable") or group.get("capturable") or isinstance(group["lr"], torch.Tensor)
    return implementation_open and not special


def _device_dtypes(group: dict[str, Any]) -> set[tuple[torch.device, torch.dtype]]:
    return {(parameter.device, parameter.dtype) for parameter in group["params"]}


def _move_counters(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    # Without `fused`, torch keeps `step` on the CPU and in the default dtype; the kernel wants it beside the parameter.
    for parameter in group["params"]:
        step = optimizer.state.get(parameter, {}).get("step")
        if isinstance(step, torch.Tensor):
            optimizer.state[parameter]["step"] = step.to(parameter.device, torch.float32)


@lru_cache(maxsize=64)
def _has_fused_kernel(cls: type[Any], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch has a fused kernel here; found by stepping one element, for its own lists are private."""
    if device.type == "meta" or not dtype.is_floating_point:
        return False
    element = torch.zeros(1, device=device, dtype=dtype, requires_grad=True)
    element.grad = torch.zeros_like(element)
    try:
        cls([element], lr=0.0, fused=True).step()
    except RuntimeError:
        return False
    return True
