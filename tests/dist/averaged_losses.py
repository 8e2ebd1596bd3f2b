"""Training of an engine on each rank's part of a batch, with the losses averaged over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor


def part_of_rank(rows: Tensor) -> Tensor:
    """Return this rank's part of a batch that all ranks have."""
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def step_and_average(engine: Any, loss: Tensor) -> float:
    """Take a step. Return the mean of `loss` over ranks."""
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def train_and_end(
    engine: Any, loss_of_step: Callable[[int], Tensor], steps: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Train and destroy an engine; return the averaged losses, and on rank 0 its parameters."""
    losses = [step_and_average(engine, loss_of_step(step)) for step in range(steps)]
    state = engine.full_state_dict()
    engine.destroy()
    return losses, state if dist.get_rank() == 0 else {}
