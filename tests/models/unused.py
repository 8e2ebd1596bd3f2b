"""Modules that get no gradient: always, or as step, micro-batch and rank say."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.models.plain import Block
from tests.models.specimen import WIDTH, Batch, Place, mse, rows


class UnusedAlways(nn.Module):
    """A block and a matrix that no forward ever uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.forgotten = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse(self.blocks[2](self.blocks[0](x)), y)


class Branches(nn.Module):
    """Takes the left or the right block as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.left = Block()
        self.right = Block()

    def forward(self, x: Tensor, y: Tensor, left: bool) -> Tensor:
        h = self.first(x)
        return mse(self.left(h) if left else self.right(h), y)


def branch_by_step(place: Place) -> Batch:
    """All ranks take the same side; the right side is unused in steps 1, 2 and 4."""
    return {**rows(place), "left": place.step in (1, 2, 4)}


def branch_by_micro(place: Place) -> Batch:
    """Sides change within a step, and in step 3 all take the left one."""
    return {**rows(place), "left": place.step == 3 or place.micro % 2 == 0}


def branch_by_rank(place: Place) -> Batch:
    """Ranks take different sides."""
    return {**rows(place), "left": (place.rank + place.step) % 2 == 0}


class Untidy(nn.Module):
    """Some output of a block is dropped, another is detached, and a third returns its input unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.passing = nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.passing(self.blocks[0](x))
        self.blocks[1](h)  # its output is never used, its parameters get no gradient
        with torch.no_grad():
            target = self.blocks[2](y)
        return mse(self.blocks[3](h), y + 0.1 * target) + mse(self.blocks[2](h.detach()), y)
