"""Replacement of the values of a parameter."""

from __future__ import annotations

import torch
from torch import nn


def replace_values(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Give a parameter `values`, which may have another shape, and drop its gradient.

    A script may keep a loss from before `initialize`. The graph of that loss keeps the parameter's gradient node, which
    expects the old shape, and later graphs would share this node. Autograd makes a new node if the dtype of a parameter
    changes, so it changes here for a moment. A backward of the old graph then raises an error for its shape.
    """
    parameter.grad = None
    other = torch.float32 if parameter.dtype == torch.float64 else torch.float64
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = values
