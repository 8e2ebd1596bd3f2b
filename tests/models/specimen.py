"""Specimen: a model, its micro-batches for each place, and the function that trains one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16
VOCABULARY = 29
ROWS = 3  # samples in a micro-batch

Batch = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Place of a micro-batch: the optimizer step, the micro-batch within it, the rank."""

    step: int
    micro: int
    rank: int

    def generator(self) -> torch.Generator:
        """Return a generator that is seeded by the place."""
        seed = 1 + self.step * 10_007 + self.micro * 101 + self.rank * 1_000_003
        return torch.Generator().manual_seed(seed)


def one_loss(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """Train a micro-batch of a model that returns its loss."""
    loss = call(**batch)
    backward(loss)
    return loss.detach()


@dataclass(frozen=True)
class Specimen:
    """Model and its training. `train(call, batch, backward)` returns the detached loss of one micro-batch."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[Place], Batch]
    train: Callable[[Callable[..., Any], Batch, Callable[..., None]], Tensor] = one_loss
    traits: frozenset[str] = field(default_factory=frozenset)


def rows(place: Place, count: int = ROWS) -> Batch:
    """Return a regression micro-batch: x and y `[count, WIDTH]`."""
    generator = place.generator()
    x = torch.randn(count, WIDTH, generator=generator)
    return {"x": x, "y": torch.tanh(x.roll(1, -1)) + 0.1 * torch.randn(count, WIDTH, generator=generator)}


def many_rows(place: Place) -> Batch:
    """Return a regression micro-batch with enough rows for a variance well above zero."""
    return rows(place, 8 * ROWS)


def tokens(place: Place) -> Batch:
    """Return a language micro-batch: ids `[ROWS, 6]`."""
    return {"ids": torch.randint(0, VOCABULARY, (ROWS, 6), generator=place.generator())}


def mse(out: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error in fp32, for any dtype of the model."""
    return F.mse_loss(out.float(), y.float())


def cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the next-token loss in fp32."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """Return the batch with its floating-point tensors in `dtype`."""
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: cast(value, dtype) for key, value in batch.items()}
    return batch
