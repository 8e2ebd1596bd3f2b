"""Basic models for other specimens: residual blocks with a loss."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.specimen import WIDTH, mse


class Block(nn.Module):
    """Residual feed-forward block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Regressor(nn.Module):
    """Sequence of blocks with a loss; the base class of most specimens."""

    def __init__(self, blocks: int = 2, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse(self.head(self.hidden(x)), y)


def mlp() -> nn.Module:
    """Return two blocks and a head."""
    return Regressor()


class FourBlocks(nn.Module):
    """Model of four equal blocks, which are larger than those of other specimens."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.inward = nn.Linear(WIDTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.outward = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.inward(x)
        for block in self.blocks:
            h = block(h)
        return mse(self.outward(h), y)
