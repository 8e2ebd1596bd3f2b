"""Models with torch's activation checkpointing, reentrant and not."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.plain import Block
from tests.models.specimen import WIDTH, mse


class Checkpointed(nn.Module):
    """Model with every block under activation checkpointing of one kind."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inward = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return mse(x, y)


class CheckpointedPairs(nn.Module):
    """Model with a checkpoint around each pair of blocks, and a frozen block in the second pair."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inward = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[2].requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inward(x)
        for index in (0, 2):
            x = checkpoint(nn.Sequential(*self.blocks[index : index + 2]), x, use_reentrant=self.reentrant)
        return mse(x, y)
