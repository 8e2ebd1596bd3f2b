"""Replacement of the values of a parameter."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from windlass.base.errors import ModelError


def replace_values(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Give a parameter `values`, which may have another shape, and drop its gradient.

    A script may keep a loss from before `initialize`. The graph of that loss keeps the parameter's gradient node, which
    expects the old shape, and later graphs would share this node. Autograd makes a new node if the dtype of a parameter
    changes, so the dtype changes here for a moment. A backward of the old graph then raises ModelError: autograd itself
    does not compare the shape of a gradient with the new shape of the parameter.
    """
    parameter.grad = None
    if parameter.requires_grad and not (parameter.is_inference() or torch.is_inference_mode_enabled()):
        old_shape, new_shape = list(parameter.shape), list(values.shape)

        def refuse(_: object) -> NoReturn:
            raise ModelError(
                f"backward of a loss from before initialize, which replaced a parameter of shape {old_shape} by its "
                f"part of shape {new_shape}: compute the loss again with the engine"
            )

        get_gradient_edge(parameter).node.register_prehook(refuse)
    other = torch.float32 if parameter.dtype == torch.float64 else torch.float64
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = values
