"""Connection of a model's compression to the engine that trains it."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from windlass.base.errors import ConfigError
from windlass.compress.compression_training import compression_clock, needs_preparation
from windlass.compress.distillation import attached_distillation
from windlass.config.compression_section import CompressionTraining
from windlass.config.distillation_section import DistillationConfig
from windlass.parallel.pipeline.pipeline_sequential import PipelineSequential


class CountsSteps(Protocol):
    """Part of an engine's counters that compression schedules use."""

    global_steps: int


def check_compression(model: nn.Module, section: CompressionTraining) -> None:
    """Check that a model is prepared for the techniques of its configuration.

    Raises:
        ConfigError: the model is not prepared.
    """
    if needs_preparation(section) and compression_clock(model) is None:
        raise ConfigError(
            "compression_training is enabled, but the model has no compressed layers; call init_compression(model, "
            "config) of windlass.compress.compression_training before initialize, or delete the section"
        )


def check_distillation(model: nn.Module, section: DistillationConfig, sp: int) -> None:
    """Check that a model has a teacher if the configuration has distillation, and that its forward gets full sequences;
    choose the modules to compare. Call it before a pipeline moves parts of the model to other ranks.

    Args:
        sp: size of the sequence-parallel group.

    Raises:
        ConfigError: the model has no teacher, is a `PipelineSequential`, or `sp` is above 1.
    """
    attached = attached_distillation(model)
    if section.requested_key() is not None and attached is None:
        raise ConfigError(
            "the configuration has distillation, but the model has no teacher; call Distillation(teacher, ...)."
            "attach(model) of windlass.compress.distillation before initialize, or delete the section"
        )
    if attached is None:
        return
    if sp > 1:
        raise ConfigError(f"distillation compares whole sequences, and sp is {sp}; set parallel.sp to 1")
    if isinstance(model, PipelineSequential):
        raise ConfigError(
            f"distillation needs a model whose output has logits and a loss, not a {type(model).__name__}; pass the "
            "model itself, which parallel.pp splits into stages"
        )
    attached.keep_pairs(model)


def follow_engine_steps(model: nn.Module, progress: CountsSteps) -> None:
    """Make a prepared model read the step from an engine's counters, so that its schedules continue after a checkpoint
    is loaded. The model refers to the counters even after the engine is destroyed."""
    clock = compression_clock(model)
    if clock is not None:
        clock.source = lambda: progress.global_steps
