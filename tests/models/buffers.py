"""Models whose forwards write buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.models.plain import Block
from tests.models.specimen import WIDTH, mse


class Normalised(nn.Module):
    """Model with BatchNorm: running statistics and an integer counter as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse(self.out(torch.relu(self.norm(self.inward(x)))), y)


class BufferInForward(nn.Module):
    """Model whose forward reads and writes a buffer, so that ranks with different buffers compute different values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.randn(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shifted = x - self.centre.clone()
        with torch.no_grad():
            self.centre.mul_(0.5).add_(x.mean(0), alpha=0.5)
            self.steps += 1
        for block in self.blocks:
            shifted = block(shifted)
        return mse(shifted, y)
