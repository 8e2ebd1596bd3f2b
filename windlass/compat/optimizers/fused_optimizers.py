"""Classes FusedAdam, FusedLion and FusedLamb: torch's and windlass's optimizers with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from windlass.compat.optimizers.optimizer_refusal import check_adam
from windlass.optim.lamb import Lamb
from windlass.optim.lion import Lion


class MultiTensorApply:
    """Caller of a kernel that takes a chunk size, an overflow flag and lists of tensors.

    Args:
        chunk_size: number of elements that the kernel processes at a time.
    """

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


class _SetGradNoneMixin(torch.optim.Optimizer):
    """Mixin whose `zero_grad` follows `set_grad_none`."""

    set_grad_none: bool = True  # copies of an optimizer use this value: torch does not copy attributes

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Set gradients to None, or to zero."""
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)


class FusedAdam(_SetGradNoneMixin, torch.optim.Adam):
    """Adam optimizer of torch: AdamW, or Adam with `adam_w_mode=False`.

    Raises:
        OptimizerRefusal: `amsgrad` is True or `bias_correction` is False.
    """

    same_rule_as: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam
    adam_w_mode = 1  # copies of an optimizer use this value: torch does not copy attributes

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        check_adam("FusedAdam", amsgrad, bias_correction)
        self.set_grad_none, self.adam_w_mode = set_grad_none, int(adam_w_mode)
        made: dict[str, Any] = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        torch.optim.Adam.__init__(self, params, **made, decoupled_weight_decay=bool(adam_w_mode))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled or loaded state, which may be that of DeepSpeed's class.

        DeepSpeed's groups do not name the kind of weight decay, and only the last parameter of a group counts steps.

        Raises:
            OptimizerRefusal: a group has `bias_correction` False.
        """
        for group in state["param_groups"]:
            group.setdefault("decoupled_weight_decay", bool(self.adam_w_mode))
            if "bias_correction" in group:  # a group of DeepSpeed's class
                check_adam("FusedAdam", False, group.pop("bias_correction"))
                states = [state["state"][one] for one in group["params"] if state["state"].get(one)]
                steps = max(float(count) for count in (group.pop("step", 0), *(one.get("step", 0) for one in states)))
                for one in states:
                    one["step"] = steps
        torch.optim.Adam.__setstate__(self, state)


class FusedLion(_SetGradNoneMixin, Lion):
    """Optimizer `windlass.optim.Lion` with DeepSpeed's defaults."""

    same_rule_as: ClassVar[type[torch.optim.Optimizer]] = Lion

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        self.set_grad_none = set_grad_none
        Lion.__init__(self, params, lr=lr, betas=betas, weight_decay=weight_decay)


class FusedLamb(Lamb):
    """Optimizer `windlass.optim.Lamb`, which computes in the same order as DeepSpeed's class."""
