"""Callables of an engine that its sharded model calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from windlass.zero.access.script_gradients import ScriptGradientCallbacks
from windlass.zero.core.unit import Unit

if TYPE_CHECKING:
    from windlass.zero.sharded_model import ShardedModel


@dataclass(frozen=True)
class EngineCallbacks:
    """Callables of the engine that a `ShardedModel` calls. The defaults are those of a model that is only evaluated.

    Attributes:
        gradient_weight: Returns the factor of gradients of the running backward, usually 1 / accumulation steps.
        reduces_this_backward: Returns True if the running backward reduces gradients.
        is_step_next: Returns True if a step follows the running backward.
        loss_scale: Returns the loss scale of the current gradients.
        on_gradient: Called with unit, index in the unit and gradient as each gradient arrives; None: not called.
        on_backward_begin: Called when an outermost backward outside a forward begins.
        on_backward_end: Called when the outermost backward has ended and its reductions, if any, have started.
        before_update: Called on all ranks before an update, with the gradient norm (without the loss scale) and the
            clip coefficient; the gradients are reduced then.
        on_weights_edited: Called when master weights, states or parameters are about to be replaced.
        on_gradient_dropped: Called with the name of each parameter whose gradient a script drops, and True if it is
            only zeroed.
        script_gradients: Rules for gradients that a script reads, sets or drops.
    """

    gradient_weight: Callable[[], float] = lambda: 1.0
    reduces_this_backward: Callable[[], bool] = lambda: True
    is_step_next: Callable[[], bool] = lambda: False
    loss_scale: Callable[[], float] = lambda: 1.0
    on_gradient: Callable[[Unit, int, torch.Tensor], None] | None = None
    on_backward_begin: Callable[[], None] = lambda: None
    on_backward_end: Callable[[], None] = lambda: None
    before_update: Callable[[float, float], None] = lambda norm, clip: None
    on_weights_edited: Callable[[], None] = lambda: None
    on_gradient_dropped: Callable[[str, bool], None] = lambda name, zero: None
    script_gradients: ScriptGradientCallbacks = field(default_factory=ScriptGradientCallbacks)


BuildShardedModel = Callable[[EngineCallbacks], "ShardedModel"]
"""Function that shards an engine's model. Collective. The engine calls it again to adapt to a changed model."""
