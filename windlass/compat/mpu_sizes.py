"""Sizes of a script's model-parallel unit (`mpu`)."""

from __future__ import annotations

from typing import Any

MODEL_AXES = ("model", "tensor_model", "slice", "pipeline_model", "pipe", "expert_model", "expert")
"""Axes along which ranks hold different parameters, by the names in an mpu's methods."""
TOKEN_AXES = ("sequence", "context")
"""Axes along which ranks hold different tokens of the same samples."""


def spans_ranks(mpu: Any, axes: tuple[str, ...] = MODEL_AXES + TOKEN_AXES) -> bool:
    """Return True if `mpu` has several ranks along one of the axes. An axis that it lacks counts as one rank."""
    sizes = [getattr(mpu, f"get_{axis}_parallel_world_size", None) for axis in axes]
    return any(size is not None and size() > 1 for size in sizes)
