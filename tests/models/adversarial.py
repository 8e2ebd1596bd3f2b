"""Two models that train against each other: the generator's loss passes through the discriminator.

One loop serves plain PyTorch and engines: what it drops between backwards and steps is part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.specimen import Place

NOISE, PIXELS, HIDDEN, BATCH = 6, 12, 16, 4


class Generator(nn.Module):
    """Noise to a small picture."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(NOISE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, PIXELS), nn.Tanh())

    def forward(self, noise: Tensor) -> Tensor:
        return self.net(noise)


class Discriminator(nn.Module):
    """The probability that a picture is real."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.LeakyReLU(0.2), nn.Linear(HIDDEN, 1), nn.Sigmoid())

    def forward(self, picture: Tensor) -> Tensor:
        return self.net(picture).view(-1)


def pair() -> tuple[Generator, Discriminator]:
    """Both models, from one seed."""
    torch.manual_seed(999)
    return Generator(), Discriminator()


def adam(model: nn.Module) -> torch.optim.Adam:
    """As in the usual recipe; a large eps keeps rounding out of it."""
    return torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.999), eps=1e-4)


@dataclass
class Side:
    """One of the two in training.

    Attributes:
        call: its forward.
        zero_grad: the way by which its gradients are dropped at the beginning of its turn.
        backward: from its loss, through whatever made that.
    """

    call: Callable[[Tensor], Tensor]
    zero_grad: Callable[[], Any]
    backward: Callable[[Tensor], Any]
    step: Callable[[], Any]


def train(generator: Side, discriminator: Side, ranks: Sequence[int], steps: int) -> list[list[float]]:
    """The losses of the generator, by step and rank, of the ranks that this process computes."""
    told = []
    for step in range(steps):
        discriminator.zero_grad()
        fakes = []
        for rank in ranks:
            draw = Place(step, 0, rank).generator()
            real, noise = torch.randn(BATCH, PIXELS, generator=draw).tanh(), torch.randn(BATCH, NOISE, generator=draw)
            discriminator.backward(F.binary_cross_entropy(discriminator.call(real), torch.ones(BATCH)))
            fakes.append(generator.call(noise))
            judged = discriminator.call(fakes[-1].detach())
            discriminator.backward(F.binary_cross_entropy(judged, torch.zeros(BATCH)))
        discriminator.step()
        generator.zero_grad()
        losses = [F.binary_cross_entropy(discriminator.call(fake), torch.ones(BATCH)) for fake in fakes]
        for loss in losses:
            generator.backward(loss)
        generator.step()
        told.append([float(loss.detach()) for loss in losses])
    return told


def train_plain(ranks: int, steps: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """In one process, the mean over ranks: losses by step and rank, and parameters."""
    models = pair()

    def side(model: nn.Module) -> Side:
        optimizer = adam(model)
        return Side(model, optimizer.zero_grad, lambda loss: (loss / ranks).backward(), optimizer.step)

    losses = train(side(models[0]), side(models[1]), range(ranks), steps)
    return losses, {f"{n}.{name}": p.detach() for n, m in enumerate(models) for name, p in m.named_parameters()}
