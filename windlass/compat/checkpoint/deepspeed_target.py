"""Description of the equivalent DeepSpeed engine, for checkpoints in its format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from windlass.checkpoint.foreign_formats import ExportSource
from windlass.compat.checkpoint.deepspeed_export import DeepSpeedTarget
from windlass.config import Config
from windlass.engine.extra_state import extra_state_names
from windlass.optim.loss_scale import DynamicLossScale, LossScale

_FLAT = ("FusedAdam",)  # optimizers that DeepSpeed's stage 0 gives flattened groups if parameters are 16-bit


def build_deepspeed_target(source: ExportSource) -> DeepSpeedTarget:
    """Build the `DeepSpeedTarget` of an engine."""
    model, config = source.model, source.config
    zero = config.zero_optimization
    return DeepSpeedTarget(
        stage=model.policy.stage,
        dp_world_size=model.mesh.dense.data.size,
        sub_group_size=zero.sub_group_size,
        round_robin_gradients=zero.round_robin_gradients,
        low_precision="bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else None,
        state_dict_keys=list(_state_dict_keys(model.model)),
        trainable_names=frozenset(name for unit in model.units if unit.trainable for name in unit.names),
        flat_optimizer=_steps_flat_groups(config, source.optimizer),
        gradient_clipping=config.gradient_clipping,
        loss_scaling=_loss_scaling_fields(source.loss_scale),
        config=source.raw_config if isinstance(source.raw_config, dict) else {},
    )


def _state_dict_keys(model: nn.Module) -> Iterator[str]:
    """Yield the keys of the model's `state_dict()` in its order.

    `state_dict()` itself raises if parameters are sharded.
    """
    extra = set(extra_state_names(model))
    for prefix, module in model.named_modules(remove_duplicate=False):
        dotted = f"{prefix}." if prefix else ""
        yield from (dotted + name for name, parameter in module._parameters.items() if parameter is not None)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield dotted + name
        if (name := f"{dotted}_extra_state") in extra:
            yield name


def _steps_flat_groups(config: Config, optimizer: torch.optim.Optimizer | None) -> bool:
    section = config.optimizer
    if optimizer is None or section is None:
        return optimizer is not None and type(optimizer).__name__ in _FLAT
    return section.type.lower() in ("adam", "adamw") and not section.params.get("torch_adam")


def _loss_scaling_fields(scaler: LossScale) -> dict[str, Any]:
    if not isinstance(scaler, DynamicLossScale):
        return {"dynamic": False}
    return {
        "dynamic": True,
        "window": scaler.window,
        "min_scale": scaler.min_scale,
        "hysteresis": scaler.hysteresis,
        "consecutive_hysteresis": scaler.consecutive_hysteresis,
        "raises": scaler.on_min_scale == "raise",
    }
