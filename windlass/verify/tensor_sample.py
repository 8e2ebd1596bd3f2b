"""Sample of a tensor for a later comparison: some of its elements and the norm of all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LIMIT = 1024  # most elements in a sample; a smaller tensor is sampled completely


@dataclass(frozen=True)
class TensorSample:
    """Every `stride`-th element of a tensor, on the CPU, and the 2-norm of the whole tensor.

    Attributes:
        values: `[at most LIMIT]`, in the tensor's dtype.
        shape: shape of the tensor.
        stride: distance of the sampled elements in the flat tensor.
        norm: 2-norm of all elements, in float64.
    """

    values: torch.Tensor
    shape: torch.Size
    stride: int
    norm: float

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return self.values.dtype

    @property
    def rms(self) -> float:
        """Root mean square of all elements."""
        return self.norm / math.sqrt(max(1, self.shape.numel()))


def sample_tensor(tensor: torch.Tensor) -> TensorSample:
    """Copy a sample of `tensor`, which may change afterwards."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    stride = max(1, -(-flat.numel() // LIMIT))
    wide = flat if flat.is_floating_point() else flat.double()
    norm = float(torch.linalg.vector_norm(wide, dtype=torch.float64))
    return TensorSample(flat[::stride].clone().cpu(), tensor.shape, stride, norm)
