"""Classes that DeepSpeed's checkpoints refer to by name. They unpickle into containers of the saved attributes."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

# Keys of a dynamic loss scale's arguments.
INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"


class LossScalerBase:
    """Saved loss scale, with its attributes as saved."""

    def __init__(self, cur_scale: float = 1.0) -> None:
        self.cur_scale, self.dynamic = cur_scale, False

    @property
    def loss_scale(self) -> float:
        """Value of the loss scale."""
        return self.cur_scale

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class LossScaler(LossScalerBase):
    """Static loss scale."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(scale)


class DynamicLossScaler(LossScalerBase):
    """Dynamic loss scale."""

    def __init__(self, init_scale: float = 2.0**32, **others: Any) -> None:
        super().__init__(init_scale)
        self.dynamic = True
        self.__dict__.update(others)


class ZeroStageEnum(int, enum.Enum):
    """ZeRO stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


@dataclass
class fragment_address:  # noqa: N801  (the name that is in files)
    """Position of a fragment in a flat buffer, in elements."""

    numel: int
    start: int


class OffloadDeviceEnum(str, enum.Enum):  # noqa: UP042  (its text is as DeepSpeed's)
    """Device of offloaded data."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):  # noqa: UP042  (its text is as DeepSpeed's)
    """State types that `engine.offload_states` can offload."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
