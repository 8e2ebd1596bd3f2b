"""What all ranks must know before each optimizer step, in one small reduction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class LossAgreement:
    """The same on every rank."""

    loss: float  # mean over micro-batches and ranks
    stop_requested: bool  # some rank was asked to stop
    first_non_finite: tuple[int, int] | None  # rank and micro-batch of the first loss that is not finite


def all_reduce_losses(losses: list[torch.Tensor], stop_requested: bool) -> LossAgreement:
    """Shares this rank's micro-batch losses (scalars) and its wish to stop. Collective.

    One of each rank's numbers reaches every rank, and the host waits for the device once.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    own = torch.stack([loss.detach().float() for loss in losses])
    finite = own.isfinite()
    shared = torch.zeros(2 + world, device=own.device)
    shared[0] = own.nan_to_num(0.0, 0.0, 0.0).mean() / world
    shared[1] = float(stop_requested)
    # The first bad micro-batch counted from 1; argmin of a bool tensor finds the first False.
    shared[2 + rank] = torch.where(finite.all(), 0, finite.int().argmin() + 1)
    dist.all_reduce(shared)
    loss, stops, *firsts = shared.tolist()
    bad = next(((index, int(first) - 1) for index, first in enumerate(firsts) if first), None)
    return LossAgreement(loss if bad is None else float("nan"), stops > 0, bad)


def all_reduce_sum(values: list[float], device: torch.device) -> list[float]:
    """The elementwise sum over ranks, in double precision. Collective."""
    shared = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(shared)
    return list(map(float, shared.tolist()))
