"""Classes OnebitAdam, OnebitLamb and ZeroOneAdam: windlass's optimizers with DeepSpeed's arguments.

The argument `deepspeed`, the engine in DeepSpeed's classes, is accepted and ignored. The arguments after it are those
of windlass's class, in the same order as in DeepSpeed's.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import ParamsT

from windlass import optim


class OnebitAdam(optim.OneBitAdam):
    """Optimizer `windlass.optim.OneBitAdam` with the arguments of DeepSpeed's class."""

    same_rule_as = optim.OneBitAdam.same_rule_as

    def __init__(self, params: ParamsT, deepspeed: Any = None, lr: float = 1e-3, *more: Any, **options: Any) -> None:
        super().__init__(params, lr, *more, **options)


class ZeroOneAdam(optim.ZeroOneAdam):
    """Optimizer `windlass.optim.ZeroOneAdam` with the arguments of DeepSpeed's class."""

    same_rule_as = optim.ZeroOneAdam.same_rule_as

    def __init__(self, params: ParamsT, deepspeed: Any = None, lr: float = 1e-3, *more: Any, **options: Any) -> None:
        super().__init__(params, lr, *more, **options)


class OnebitLamb(optim.OneBitLamb):
    """Optimizer `windlass.optim.OneBitLamb` with the arguments of DeepSpeed's class."""

    def __init__(self, params: ParamsT, deepspeed: Any = None, lr: float = 1e-3, *more: Any, **options: Any) -> None:
        super().__init__(params, lr, *more, **options)
