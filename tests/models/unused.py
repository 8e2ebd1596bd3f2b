"""Models with modules that get no gradient, always or depending on step, micro-batch and rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.models.plain import Block
from tests.models.specimen import WIDTH, Batch, Place, mse, rows


class UnusedAlways(nn.Module):
    """Model with a block and a matrix that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.forgotten = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse(self.blocks[2](self.blocks[0](x)), y)


class Branches(nn.Module):
    """Model that runs the left or the right block, as the batch requests."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.left = Block()
        self.right = Block()

    def forward(self, x: Tensor, y: Tensor, left: bool) -> Tensor:
        h = self.first(x)
        return mse(self.left(h) if left else self.right(h), y)


def branch_by_step(place: Place) -> Batch:
    """Return a batch with the same side on all ranks. The right side is unused in steps 1, 2 and 4."""
    return {**rows(place), "left": place.step in (1, 2, 4)}


def branch_by_micro(place: Place) -> Batch:
    """Return a batch whose side changes within a step. In step 3 all micro-batches take the left side."""
    return {**rows(place), "left": place.step == 3 or place.micro % 2 == 0}


def branch_by_rank(place: Place) -> Batch:
    """Return a batch whose side differs between ranks."""
    return {**rows(place), "left": (place.rank + place.step) % 2 == 0}


class Untidy(nn.Module):
    """Model with a dropped block output, a detached block output, and a module that returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.passing = nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.passing(self.blocks[0](x))
        self.blocks[1](h)  # the output is never used, so the parameters get no gradient
        with torch.no_grad():
            target = self.blocks[2](y)
        return mse(self.blocks[3](h), y + 0.1 * target) + mse(self.blocks[2](h.detach()), y)
