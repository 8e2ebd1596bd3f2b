"""DeepSpeed's classes of optimizers, for `isinstance`: which of them DeepSpeed would have made for an engine.

`initialize` makes a `ShardedOptimizer` at every stage and for every precision. Scripts ask for the class to learn the
stage, or to find what a stage calls its master weights; so each class here accepts optimizers of its own kind alone.
"""

from __future__ import annotations

from typing import Any, ClassVar

from windlass.config import Config
from windlass.engine.optimizer import ShardedOptimizer

ATTRIBUTE = "deepspeed_kind"
"""Attribute of an optimizer of the stand-in that holds its kind."""


def kind_of(config: Config) -> str:
    """Return the kind of optimizer that DeepSpeed makes for a configuration; "basic" is the script's own."""
    stage = config.zero_optimization.stage
    if stage == 3:
        return "stage 3"
    if stage == 1 and config.bf16.enabled and config.data_types.grad_accum_dtype == "fp32":
        return "bf16"
    if stage in (1, 2):
        return "stages 1 and 2"
    if config.fp16.enabled or config.bf16.enabled:
        named = config.optimizer is not None and config.optimizer.type.lower() in ("adam", "adamw")
        return "fused" if named else "unfused"
    return "basic"


class _Kind(type):
    """Metaclass: an instance is an optimizer that holds one of the class's `kinds`."""

    kinds: tuple[str, ...]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ShardedOptimizer) and getattr(instance, ATTRIBUTE, None) in cls.kinds


class ZeROOptimizer(ShardedOptimizer, metaclass=_Kind):
    """Optimizer of stages 1 to 3."""

    kinds: ClassVar[tuple[str, ...]] = ("stage 3", "stages 1 and 2", "bf16")


class DeepSpeedZeroOptimizer(ShardedOptimizer, metaclass=_Kind):
    """Optimizer of stages 1 and 2."""

    kinds: ClassVar[tuple[str, ...]] = ("stages 1 and 2",)


class DeepSpeedZeroOptimizer_Stage3(ShardedOptimizer, metaclass=_Kind):
    """Optimizer of stage 3."""

    kinds: ClassVar[tuple[str, ...]] = ("stage 3",)


class BF16_Optimizer(ShardedOptimizer, metaclass=_Kind):
    """Optimizer of stage 1 with bf16 parameters and fp32 accumulation."""

    kinds: ClassVar[tuple[str, ...]] = ("bf16",)


class FP16_Optimizer(ShardedOptimizer, metaclass=_Kind):
    """Optimizer of stage 0 with 16-bit parameters, of a fused rule."""

    kinds: ClassVar[tuple[str, ...]] = ("fused",)


class FP16_UnfusedOptimizer(ShardedOptimizer, metaclass=_Kind):
    """Optimizer of stage 0 with 16-bit parameters, of another rule."""

    kinds: ClassVar[tuple[str, ...]] = ("unfused",)
