"""Connection of a model's compression to the engine that trains it."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import nn

from windlass.base.errors import ConfigError
from windlass.compress.compression_training import compression_clock, needs_preparation
from windlass.config.compression_section import CompressionTraining


class CountsSteps(Protocol):
    """Engine, as far as the schedules of compression need it."""

    @property
    def global_steps(self) -> int: ...


def check_compression(model: nn.Module, section: CompressionTraining, tp: int, pp: int) -> None:
    """Check that a model is prepared for the techniques of its configuration.

    Raises:
        ConfigError: it is not, or its matrices are distributed.
    """
    if needs_preparation(section) and compression_clock(model) is None:
        raise ConfigError(
            "compression_training is enabled, but the model has no compressed layers; call init_compression(model, "
            "config) of windlass.compress.compression_training before initialize, or delete the section"
        )
    if compression_clock(model) is not None and (tp > 1 or pp > 1):
        raise ConfigError(
            f"compression_training runs under ZeRO, not with tp {tp} and pp {pp}: a matrix is rounded as a whole; set "
            "both to 1"
        )


def follow_engine_steps(model: nn.Module, engine: CountsSteps) -> None:
    """Set the steps of a prepared model from the engine before each forward, so that its schedules continue when a
    checkpoint is loaded."""
    clock = compression_clock(model)
    if clock is None:
        return
    reference = weakref.ref(engine)

    def set_step(module: nn.Module, inputs: Any) -> None:
        found = reference()
        if found is not None:
            clock.step = found.global_steps

    model.register_forward_pre_hook(set_step)
