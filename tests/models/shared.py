"""Models that use parameters and modules in more than one place."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.plain import Block
from tests.models.specimen import VOCABULARY, WIDTH, cross_entropy, mse


class Tied(nn.Module):
    """Model whose embedding and head share one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return cross_entropy(self.head(h), ids)


class Sibling(nn.Module):
    """Model that uses the embedding's weight in the parent without a second call of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return cross_entropy(F.linear(h, self.embed.weight), ids)


class SiblingBlock(nn.Module):
    """Model with two blocks that read the weight of another block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.reader = nn.ModuleList([BorrowingBlock(self.blocks[0]) for _ in range(2)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in [*self.blocks, *self.reader]:
            x = block(x)
        return mse(x, y)


class BorrowingBlock(nn.Module):
    """Block that uses the `down` weight of another block."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, 2 * WIDTH)
        self.lender = [lender]  # in a list: not registered as a child

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(F.gelu(self.own(x)), self.lender[0].down.weight)


class Siamese(nn.Module):
    """Model that calls one tower on two inputs in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse(self.tower(x), self.tower(y).detach()) + mse(self.tower(y), x)


class LayerReuse(nn.Module):
    """Model that applies one block three times in depth, with another block in between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for index in (0, 1, 0, 0):
            x = self.blocks[index](x)
        return mse(x, y)
