"""Class OnebitAdam: windlass's 1-bit Adam with DeepSpeed's arguments."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import ParamsT

from windlass.optim.one_bit_adam import OneBitAdam


class OnebitAdam(OneBitAdam):
    """Optimizer `windlass.optim.OneBitAdam`; `deepspeed`, the engine in DeepSpeed's signature, is not needed."""

    same_rule_as = OneBitAdam.same_rule_as

    def __init__(self, params: ParamsT, deepspeed: Any = None, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, lr=lr, **options)
