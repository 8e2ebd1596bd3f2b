"""Tensors that a model may view and change as it likes."""

from __future__ import annotations

import torch


def as_contiguous_non_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and no view: what comes from an exchange may lie in the order in which it travelled, and
    autograd forbids to change a view that one of its functions made."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor._is_view() else tensor
