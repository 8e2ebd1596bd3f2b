"""Properties of optimizer classes: stepping of flat spans of a parameter, fused steps, and bytes of states."""

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
_PROBE_ELEMENTS = 4096  # a multiple of the block size of states that are quantized in blocks
SCALAR_STATES = frozenset({"step", "eta", "mu", "mu_product"})
"""States of elementwise optimizers that are one number per parameter. The others have a value or code per element."""

_FUSED: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.Adagrad,
)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if stepping the spans of a parameter one by one equals stepping the full parameter.

    Only the exact class counts, since a subclass may use the full tensor where its parent does not. A subclass
    whose step is that of an elementwise class names this class in `same_rule_as` (`get_step_class`).
    """
    return get_step_class(optimizer) in _ELEMENTWISE


def get_step_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class whose step `optimizer` uses: its own class, or the class that its own class names in
    `same_rule_as`.
    """
    own = type(optimizer)
    rule: type[torch.optim.Optimizer] = vars(own).get("same_rule_as", own)
    return rule


def enable_fused_step(optimizer: torch.optim.Optimizer) -> bool:
    """Enable torch's fused step in every group that supports it, unless the user chose an implementation.

    A user's choice is any of `fused`, `foreach`, `capturable`, `differentiable`, or a tensor learning rate. Existing
    `step` counters move to the device on which the fused kernel reads them.

    Returns:
        True if every group has a fused step now.
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
    """Return True if `step()` reads the tensors `grad_scale` and `found_inf` of `optimizer`, as `torch.amp.GradScaler`
    sets them.

    Both are one-element fp32 tensors on the parameters' device. Gradients are divided by `grad_scale`; torch's
    fused steps write the quotients back, a `CPUOptimizer` does not. If `found_inf` is 1, nothing is updated, including
    moments and `step`. Other steps do not read the two tensors.
    """
    return isinstance(optimizer, CPUOptimizer) or get_step_class(optimizer) in _FUSED and _all_fused(optimizer)


def measure_state_bytes(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> int:
    """Return the bytes per element of an elementwise optimizer's states for a parameter of `dtype`.

    The value is that of the group with the largest states, measured by stepping a few elements, and rounded up.
    """
    most = 0
    for group in optimizer.param_groups:
        state = probe_state(optimizer, group, torch.zeros(_PROBE_ELEMENTS, dtype=dtype))
        states = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
        most = max(most, -(-sum(state.numel() * state.element_size() for state in states) // _PROBE_ELEMENTS))
    return most


def probe_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], values: torch.Tensor) -> dict[str, Any]:
    """Return the state that one step of `optimizer` makes for a parameter `values` in a group like `group`.

    `values` is stepped with a gradient of 0. The optimizer itself stays unchanged.
    """
    probe = values.requires_grad_()
    probe.grad = torch.zeros_like(probe)
    probed: Any = object.__new__(type(optimizer))
    probed.__dict__.update(optimizer.__dict__)
    probed.__dict__.pop("step", None)  # a scheduler may have set a wrapper here that would step the original
    probed.state, probed._optimizer_step_pre_hooks, probed._optimizer_step_post_hooks = (
        defaultdict(dict),
        OrderedDict(),
        OrderedDict(),
    )
    plain = {key: False for key in ("capturable", "fused") if group.get(key)}
    if "bias_correction" in group:
        plain["bias_correction"] = True  # for OneBitAdam, whose step raises if it is False; states are equal
    probed.param_groups = [{**group, **plain, "params": [probe]}]
    probed.step()
    state: dict[str, Any] = probed.state[probe]
    return state


def _all_fused(optimizer: torch.optim.Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def _allows_fused_step(group: dict[str, Any]) -> bool:
    implementation_open = group.get("fused") is None and group.get("foreach") is None
    special = group.get("differentiable") or group.get("capturable") or isinstance(group["lr"], torch.Tensor)
    return implementation_open and not special


def _device_dtypes(group: dict[str, Any]) -> set[tuple[torch.device, torch.dtype]]:
    return {(parameter.device, parameter.dtype) for parameter in group["params"]}


def _move_counters(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    # Without `fused`, torch keeps `step` on the CPU in the default dtype; the kernel reads it on the parameter's
    # device.
    for parameter in group["params"]:
        step = optimizer.state.get(parameter, {}).get("step")
        if isinstance(step, torch.Tensor):
            optimizer.state[parameter]["step"] = step.to(parameter.device, torch.float32)


@lru_cache(maxsize=64)
def _has_fused_kernel(cls: type[Any], device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if this torch has a fused kernel for the class, device and dtype. Tries one step, since torch's own
    lists are private.
    """
    if device.type == "meta" or not dtype.is_floating_point:
        return False
    element = torch.zeros(1, device=device, dtype=dtype, requires_grad=True)
    element.grad = torch.zeros_like(element)
    try:
        cls([element], lr=0.0, fused=True).step()
    except RuntimeError:
        return False
    return True
