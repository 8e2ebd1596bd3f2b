"""Conversion of a tensor to one that a model may view and modify in place."""

from __future__ import annotations

import torch


def as_contiguous_non_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, contiguous and not a view.

    The result of a collective may have the memory order in which it was sent, and autograd forbids in-place changes of
    a view that a custom function returned.
    """
    tensor = tensor.contiguous()
    return tensor.clone() if tensor._is_view() else tensor
