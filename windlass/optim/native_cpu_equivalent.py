"""Replacement of a torch or windlass optimizer by the host-memory optimizer with the same results."""

from __future__ import annotations

from typing import Any

import torch

from windlass.kernels.kernel_dispatch import can_sum_pages, get_active_kernel_path
from windlass.optim.cpu_adagrad import CPUAdagrad
from windlass.optim.cpu_adam import CPUAdam
from windlass.optim.cpu_lion import CPULion
from windlass.optim.cpu_optimizer import CPUOptimizer
from windlass.optim.cpu_sgd import CPUSGD
from windlass.optim.elementwise_optimizers import get_step_class
from windlass.optim.lion import Lion

# Only the exact class counts (`get_step_class`), since a subclass may compute something else.
_CPU_CLASSES: dict[type[torch.optim.Optimizer], type[CPUOptimizer]] = {
    torch.optim.Adam: CPUAdam,
    torch.optim.AdamW: CPUAdam,
    torch.optim.SGD: CPUSGD,
    torch.optim.Adagrad: CPUAdagrad,
    Lion: CPULion,
}


def make_native_cpu_equivalent(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Return a `CPUAdam`, `CPUSGD`, `CPUAdagrad` or `CPULion` that steps as `optimizer` does, or None if there is none.

    Groups are copied with all their keys, states are shared, and defaults are those of the original. There is no
    equivalent if the native kernels are not in use, for other classes, complex parameters, `capturable`,
    `differentiable`, a tensor as learning rate or beta, or an implementation that the user chose (`foreach=True`,
    `fused=False`).
    """
    native = _CPU_CLASSES.get(get_step_class(optimizer))
    if (
        native is None
        or not get_active_kernel_path().is_native
        or not all(map(_has_default_options, optimizer.param_groups))
    ):
        return None
    make: Any = native
    found: CPUOptimizer = make([{**group, "params": list(group["params"])} for group in optimizer.param_groups])
    found.defaults.update(optimizer.defaults)
    found.state.update(optimizer.state)
    return found


def updates_page_sums(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if `optimizer.step` checks and renews the checksums of the memory that it changes."""
    return get_step_class(optimizer) in _CPU_CLASSES.values() and can_sum_pages()


def _has_default_options(group: dict[str, Any]) -> bool:
    chosen = group.get("foreach") or group.get("fused") is False
    special = group.get("capturable") or group.get("differentiable")
    numbers = [group["lr"], *group.get("betas", ())]
    tensors = any(isinstance(number, torch.Tensor) for number in numbers)
    return not (chosen or special or tensors or any(parameter.is_complex() for parameter in group["params"]))
