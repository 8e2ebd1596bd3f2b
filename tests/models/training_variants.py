"""Variants of training a micro-batch: several forwards, several backwards, and failures between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.plain import Block
from tests.models.specimen import WIDTH, Batch, mse, one_loss


class TwoHeads(nn.Module):
    """Model that returns two losses of one trunk, which may be recomputed in each backward."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return mse(self.heads["a"](x), y), mse(self.heads["b"](x), y.flip(-1))


def two_losses(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """Run one forward and two backwards through a shared trunk."""
    first, second = call(**batch)
    backward(first, retain_graph=True)
    backward(second)
    return (first + second).detach()


def two_forwards(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """Run two forwards, then two backwards, so that both graphs exist at once."""
    first = call(**batch)
    second = call(x=batch["y"], y=batch["x"])
    backward(first)
    backward(second)
    return (first + second).detach()


def alternating(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """Run forward, backward, forward, backward within one micro-batch."""
    first = call(**batch)
    backward(first)
    second = call(x=batch["y"], y=batch["x"])
    backward(second)
    return (first + second).detach()


def summed_forwards(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """Sum the losses of two forwards, so that one backward uses every module twice."""
    loss = call(**batch) + call(x=batch["y"], y=batch["x"])
    backward(loss)
    return loss.detach()


def retained(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """Run two backwards through the same graph, so that the gradient counts twice."""
    loss = call(**batch)
    backward(loss, retain_graph=True)
    backward(loss)
    return loss.detach()


def discarded(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """Drop the graph of a forward, before and after the forward that is trained."""
    call(x=batch["y"], y=batch["x"])
    loss = call(**batch)
    call(x=batch["y"], y=batch["x"])
    backward(loss)
    return loss.detach()


class Fragile(nn.Module):
    """Model that raises in the middle of its forward if the input requests it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FragileBlock() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor, fail: bool = False) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x, fail and index == 1)
        return mse(x, y)


class FragileBlock(nn.Module):
    """Block of `Fragile`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor, fail: bool) -> Tensor:
        x = self.inner(x)
        if fail:
            raise ArithmeticError("told to fail")
        return x


def interrupted(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """Catch the error of a failed forward (out of memory, a bad sample), then train on the same batch."""
    try:
        call(**batch, fail=True)
    except ArithmeticError:
        pass
    else:
        raise AssertionError("the forward fails as requested")
    return one_loss(call, batch, backward)


def gradient_penalty(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """Penalize the gradient with respect to the inputs: a backward that builds a graph, then one through it."""
    x = batch["x"].clone().requires_grad_()
    loss = call(x=x, y=batch["y"])
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    total = loss + 0.5 * slope.float().square().sum()
    backward(total)
    return total.detach()
