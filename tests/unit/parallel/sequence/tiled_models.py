"""Helpers of the tests of tiled computations: the largest tensor of a computation, and a gated MLP as in Llama."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Dispatch mode that records the number of elements of the largest storage that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, Tensor):
                self.elements = max(self.elements, item.untyped_storage().nbytes() // item.element_size())
        return out


class GatedMLP(nn.Module):
    """Gated MLP: two input projections and one output projection."""

    def __init__(
        self, features: int = 8, between: int = 24, drop: float = 0.0, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(features, between, bias=False, dtype=dtype)
        self.up = nn.Linear(features, between, dtype=dtype)
        self.down = nn.Linear(between, features, dtype=dtype)
        self.drop = nn.Dropout(drop)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.drop(nn.functional.silu(self.gate(hidden)) * self.up(hidden)))
