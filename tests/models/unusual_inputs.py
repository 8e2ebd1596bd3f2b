"""Models with unusual inputs and outputs: nested containers, user-defined objects, a loss outside of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.plain import Block
from tests.models.specimen import WIDTH, Batch, mse


@dataclass
class Outputs:
    """Output that is neither a tensor nor a container of torch's pytrees."""

    hidden: Tensor
    extra: dict[str, Any]


class Opaque:
    """Output with a tensor that a search of containers cannot find."""

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def read(self) -> Tensor:
        return self._value


class NestingBlock(nn.Module):
    """Block that takes and returns nested containers: a dict, a tuple of tuples, a dataclass, a user-defined object."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = Block()

    def forward(self, packed: dict[str, Any]) -> Any:
        out = self.inner(packed["deep"][0])
        if self.kind == "dict":
            return {"deep": [out], "note": "text", "none": None}
        if self.kind == "tuples":
            return ((out, 3), (None, (out * 0.5,)))
        if self.kind == "dataclass":
            return Outputs(out, {"again": out * 0.5})
        return Opaque(out)


class Nested(nn.Module):
    """Model that passes values between blocks, and returns them, in every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NestingBlock(kind) for kind in ("dict", "tuples", "dataclass", "opaque"))

    def forward(self, batch: dict[str, Tensor]) -> Outputs:
        packed = self.blocks[0]({"deep": [batch["x"]]})
        pairs = self.blocks[1](packed)
        record = self.blocks[2]({"deep": [pairs[0][0] + pairs[1][1][0]]})
        opaque = self.blocks[3]({"deep": [record.hidden + record.extra["again"]]})
        return Outputs(opaque.read(), {"loss": (mse(opaque.read(), batch["y"]),)})


def nested_loss(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """Train a model whose batch is one nested argument, and whose loss is in a tuple in a dict in a dataclass."""
    loss = call(batch).extra["loss"][0]
    backward(loss)
    return loss.detach()


class LossOutside(nn.Module):
    """Model that returns predictions, from which the caller computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        states = []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return x, states


def loss_outside(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """Train on a loss of several outputs of the model."""
    out, states = call(batch["x"])
    loss = mse(out, batch["y"]) + 0.1 * states[0].float().square().mean()
    backward(loss)
    return loss.detach()


class StashingBlock(nn.Module):
    """Block that stores an auxiliary loss on itself, which the root collects, as expert routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.inner = Block()
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        probabilities = torch.softmax(self.router(x), -1)
        self.aux = probabilities.float().mean(0).square().sum()
        return self.inner(x * (1 + probabilities[..., :1]))


class Stashed(nn.Module):
    """Model that collects the auxiliary losses of its blocks after they have run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StashingBlock() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return mse(x, y) + 0.1 * sum(block.aux for block in self.blocks)
