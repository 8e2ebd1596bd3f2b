"""Models with parameters of unusual shapes and in unusual places, and with unusual calls of modules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.models.plain import Block
from tests.models.specimen import VOCABULARY, WIDTH, cross_entropy, mse


class OddShapes(nn.Module):
    """Model with 0-dimensional, one-element, empty and prime-sized parameters, in a block and on the root."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.blocks = nn.ModuleList(OddBlock() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return mse(x * self.scale, y) + self.empty.float().sum()


class OddBlock(nn.Module):
    """Block of `OddShapes`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.ones(1))
        self.odd = nn.Parameter(torch.randn(7, 1) * 0.1)
        self.none = nn.Parameter(torch.empty(3, 0))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        extra = self.odd.sum() * self.one + self.none.sum()
        return x + self.gate * torch.tanh(self.inner(x) + extra)


class SparseTables(nn.Module):
    """Model of embeddings with sparse gradients: one that is used twice, and one with few rows in use."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.coarse = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.block = Block()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.table(ids.roll(1, -1)) + self.coarse(ids // 8)
        return cross_entropy(self.head(self.block(x)), ids)


class OtherMethod(nn.Module):
    """Model whose blocks are called through a method other than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MethodBlock() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.blocks[0].encode(x)
        x = self.blocks[1](x)
        return mse(self.blocks[0].decode(x), y)


class MethodBlock(nn.Module):
    """Block with `encode` and `decode` beside `forward`, all of which read one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.up = nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x)) + self.bias

    def decode(self, x: Tensor) -> Tensor:
        return F.linear(x - self.bias, self.up.weight.t())

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x) + self.decode(x)


class InPlace(nn.Module):
    """Model whose blocks begin by changing their input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.SiLU(inplace=True)) for _ in range(3)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = block(x)
        x += 1.0
        return mse(x, y)


class WeightNorm(nn.Module):
    """Model of parametrized weights: the parameters lie on a child module that the block never calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        doubled = nn.utils.parametrize.register_parametrization(nn.Linear(WIDTH, WIDTH), "weight", Doubled())
        self.own = nn.ModuleList([doubled])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in [*self.blocks, *self.own]:
            x = torch.tanh(block(x))
        return mse(x, y)


class Doubled(nn.Module):
    """Parametrization that owns a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight * self.gain


class RootParameter(nn.Module):
    """Model with parameters on the root, one used before and one after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.after = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x @ self.before
        for block in self.blocks:
            x = block(x)
        return mse(x + self.after, y)


class Containers(nn.Module):
    """Model of ModuleDict, ParameterList, ParameterDict and a Sequential within a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({name: nn.Sequential(nn.Sequential(Block()), Block()) for name in ("a", "b")})
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(3)])
        self.biases = nn.ParameterDict({name: nn.Parameter(torch.zeros(WIDTH)) for name in ("a", "b")})

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for gain, name in zip(self.gains, ("a", "b", "a"), strict=True):
            x = self.towers[name](x * gain) + self.biases[name]
        return mse(x, y)
