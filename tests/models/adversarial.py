"""Two models that train against each other: the generator's loss passes through the discriminator.

One loop trains plain PyTorch models and engines. It drops gradients that the loss of one model leaves in the other.
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
    """Network from noise to a small picture."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(NOISE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, PIXELS), nn.Tanh())

    def forward(self, noise: Tensor) -> Tensor:
        return self.net(noise)


class Discriminator(nn.Module):
    """Network that returns the probability that a picture is real."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.LeakyReLU(0.2), nn.Linear(HIDDEN, 1), nn.Sigmoid())

    def forward(self, picture: Tensor) -> Tensor:
        return self.net(picture).view(-1)


def pair() -> tuple[Generator, Discriminator]:
    """Return both models, initialized from one seed."""
    torch.manual_seed(999)
    return Generator(), Discriminator()


def adam(model: nn.Module) -> torch.optim.Adam:
    """Return Adam with the usual hyper-parameters and a large eps, which hides rounding."""
    return torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.999), eps=1e-4)


@dataclass
class Side:
    """One of the two models in training.

    Attributes:
        call: forward of the model.
        zero_grad: drops the model's gradients at the beginning of the model's half of a step.
        backward: runs the backward of the model's loss, which may pass through the other model.
        step: updates the model.
    """

    call: Callable[[Tensor], Tensor]
    zero_grad: Callable[[], Any]
    backward: Callable[[Tensor], Any]
    step: Callable[[], Any]


def train(generator: Side, discriminator: Side, ranks: Sequence[int], steps: int) -> list[list[float]]:
    """Train, and return the losses of the generator by step and rank, for the ranks that this process computes."""
    results = []
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
        results.append([float(loss.detach()) for loss in losses])
    return results


def train_plain(ranks: int, steps: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Train in one process on the mean over ranks. Return losses by step and rank, and parameters."""
    models = pair()

    def side(model: nn.Module) -> Side:
        optimizer = adam(model)
        return Side(model, optimizer.zero_grad, lambda loss: (loss / ranks).backward(), optimizer.step)

    losses = train(side(models[0]), side(models[1]), range(ranks), steps)
    return losses, {f"{n}.{name}": p.detach() for n, m in enumerate(models) for name, p in m.named_parameters()}
