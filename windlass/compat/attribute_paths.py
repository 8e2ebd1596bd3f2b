"""Submodules read and replaced by their dotted names, and conversion of GPT-2's transposed layers to `nn.Linear`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return the attribute at a dotted path, e.g. `model.layers[0].mlp` for `layers.0.mlp`.

    Raises:
        AttributeError, IndexError: the path does not exist.
    """
    found = model
    for part in module_name.split("."):
        found = found[int(part)] if part.isdigit() and not hasattr(found, part) else getattr(found, part)
    return found


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute at a dotted path; see `recursive_getattr`."""
    outer, _, name = module_name.rpartition(".")
    owner = recursive_getattr(model, outer) if outer else model
    if name.isdigit() and not hasattr(owner, name):
        owner[int(name)] = module
    else:
        setattr(owner, name, module)


@torch.no_grad()
def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Replace each layer of `convert_type`, whose weight is `[in, out]`, by an equivalent `nn.Linear`.

    A layer with several names has one replacement. Return the model.

    Raises:
        ModelError: the model itself is such a layer, which cannot be replaced in place.
    """
    if isinstance(model, convert_type):
        raise ModelError(
            f"convert_conv1d_to_linear: the model itself is a {type(model).__name__}, which cannot be replaced in "
            "place; pass the module that contains it"
        )
    replacements: dict[nn.Module, nn.Linear] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, convert_type):
            if module not in replacements:
                replacements[module] = _as_linear(module)
            recursive_setattr(model, name, replacements[module])
    return model


def _as_linear(module: nn.Module) -> nn.Linear:
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, torch.Tensor)
    rows, columns = weight.shape
    layer = nn.Linear(rows, columns, bias=bias is not None, device=weight.device, dtype=weight.dtype)
    layer.weight.copy_(weight.t())
    if bias is not None:
        layer.bias.copy_(bias)
    return layer
