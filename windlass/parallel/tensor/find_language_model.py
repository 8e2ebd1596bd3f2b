"""Search for the language model inside a model."""

from __future__ import annotations

from torch import nn


def find_language_model(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the name of the outermost transformers model in `model`, and this module; otherwise "" and `model`.

    Wrappers around such a model add, for example, adapters or a value head.
    """
    for name, module in model.named_modules():
        if hasattr(type(module), "tp_plan"):
            return name, module
    return "", model
