"""What DeepSpeed's engine would have been in this one's place, for checkpoints in its format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from windlass.checkpoint.deepspeed_out import Target
from windlass.engine.extra_state import names_of_extra_states
from windlass.optim.loss_scale import DynamicLossScale

if TYPE_CHECKING:
    from windlass.engine.train import Engine

_FLAT = ("FusedAdam",)  # optimizers that DeepSpeed's stage 0 steps on flat groups, under 16 bits


def target_of(engine: Engine) -> Target:
    """See `Target`."""
    model, config = engine._sharded, engine._config
    zero = config.zero_optimization
    return Target(
        stage=model.policy.stage,
        ranks=model.mesh.dense.data.size,
        sub_group=zero.sub_group_size,
        round_robin=zero.round_robin_gradients,
        half="bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else None,
        module=list(_state_names(engine.module)),
        trained=frozenset(name for unit in model.units if unit.trainable for name in unit.names),
        flat_optimizer=_is_flat(engine),
        clip=config.gradient_clipping,
        scaling=_scaling(engine),
        config=engine.config if isinstance(engine.config, dict) else {},
    )


def _state_names(model: nn.Module) -> Iterator[str]:
    """The keys of the model's `state_dict()`, in its order; that itself refuses where parameters are spread."""
    extra = set(names_of_extra_states(model))
    for prefix, module in model.named_modules(remove_duplicate=False):
        dotted = f"{prefix}." if prefix else ""
        yield from (dotted + name for name, parameter in module._parameters.items() if parameter is not None)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield dotted + name
        if (name := f"{dotted}_extra_state") in extra:
            yield name


def _is_flat(engine: Engine) -> bool:
    section = engine._config.optimizer
    if engine._optimizer is None or section is None:
        return engine._optimizer is not None and type(engine._optimizer.optimizer).__name__ in _FLAT
    return section.type.lower() in ("adam", "adamw") and not section.params.get("torch_adam")


def _scaling(engine: Engine) -> dict[str, Any]:
    scaler = engine._scaler
    if not isinstance(scaler, DynamicLossScale):
        return {"dynamic": False}
    return {
        "dynamic": True,
        "window": scaler.window,
        "min_scale": scaler.min_scale,
        "hysteresis": scaler.hysteresis,
        "consecutive_hysteresis": scaler.consecutive_hysteresis,
        "raises": scaler.at_minimum == "raise",
    }
