"""Linear layers of other classes than `nn.Linear`: `Conv1D` of GPT-2, whose weight is `[in_features, out_features]`,
and subclasses of `nn.Linear` that override its forward."""

from __future__ import annotations

import torch
from torch import nn

from windlass.parallel.tensor.linear_layers import EQUIVALENT_CLASSES


def conv1d_layers(model: nn.Module) -> list[str]:
    """Return the names of the model's `Conv1D` layers."""
    return [
        name
        for name, module in model.named_modules()
        if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    ]


def use_linear_class(model: nn.Module) -> None:
    """Change the class of layers of `EQUIVALENT_CLASSES` to `nn.Linear`, in place."""
    for module in model.modules():
        if type(module).__name__ in EQUIVALENT_CLASSES:
            module.__class__ = nn.Linear


def make_linear(model: nn.Module) -> None:
    """Replace `Conv1D` layers by linear ones with the same names and values, in place, on any device."""
    for name in conv1d_layers(model):
        layer = model.get_submodule(name)
        weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
        inputs, outputs = weight.shape
        with torch.device("meta"):
            linear = nn.Linear(inputs, outputs)
        linear.weight = nn.Parameter(weight.detach().t().contiguous(), requires_grad=weight.requires_grad)
        linear.bias = bias
        model.set_submodule(name, linear.train(layer.training))
