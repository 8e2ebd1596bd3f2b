"""Where in a model the language model is."""

from __future__ import annotations

from torch import nn


def find_language_model(model: nn.Module) -> tuple[str, nn.Module]:
    """The outermost module that is a model of transformers, and its name; else the model itself, whose name is "".

    Others wrap such models: with adapters, with a head of values.
    """
    for name, module in model.named_modules():
        if hasattr(type(module), "tp_plan"):
            return name, module
    return "", model
