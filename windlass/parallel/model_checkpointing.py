"""Switch of activation checkpointing that models of transformers have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from windlass.base.errors import ModelError


def enable_checkpointing(
    model: nn.Module, source: str = "--checkpointing", checkpoint: Callable[..., Any] | None = None
) -> None:
    """Enable activation checkpointing of each layer, as transformers does.

    Args:
        source: option or key that requests checkpointing, for the message.
        checkpoint: function that the layers call in place of torch's.

    Raises:
        ModelError: the model does not support activation checkpointing, or its layers take no other function.
    """
    newer: Any = getattr(model, "activation_checkpointing_enable", None)
    older: Any = getattr(model, "gradient_checkpointing_enable", None)
    # transformers gives every model these two methods. They raise if the class does not support checkpointing.
    supported = getattr(model, "supports_gradient_checkpointing", True)
    options: dict[str, Any] = {"use_reentrant": False}
    if newer is not None and supported:
        newer(options)
    elif older is not None and supported:
        older(gradient_checkpointing_kwargs=options)
    else:
        raise ModelError(f"{type(model).__name__} has no switch for activation checkpointing; leave {source} out")
    if checkpoint is None:
        return
    if not replace_checkpoint_function(model, checkpoint):
        raise ModelError(
            f"{type(model).__name__} checkpoints its layers by a function of its own, so {source} stores their inputs "
            "on the device; call windlass.checkpointing.checkpoint in the model, or leave the other keys of the "
            "section out"
        )


def replace_checkpoint_function(model: nn.Module, checkpoint: Callable[..., Any]) -> int:
    """Let all layers of a transformers model call another function for activation checkpointing. Return the number of
    layers."""
    layers = [module for module in model.modules() if hasattr(module, _FUNCTION)]
    for layer in layers:
        setattr(layer, _FUNCTION, checkpoint)
    return len(layers)


_FUNCTION = "_gradient_checkpointing_func"  # attribute of transformers' layers: the function that they call


def disable_checkpointing(model: nn.Module) -> None:
    """Undo `enable_checkpointing`."""
    for name in ("activation_checkpointing_disable", "gradient_checkpointing_disable"):
        disable: Any = getattr(model, name, None)
        if disable is not None:
            disable()
            return


def is_checkpointing(model: nn.Module) -> bool:
    """Return True if activation checkpointing of a module is enabled."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def can_checkpoint(model: nn.Module) -> bool:
    """Return True if the model declares `supports_gradient_checkpointing`."""
    return bool(getattr(model, "supports_gradient_checkpointing", False))
