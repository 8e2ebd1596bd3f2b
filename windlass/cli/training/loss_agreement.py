"""Losses and stop requests of all ranks, combined in one small all-reduce in each optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from windlass.comm.rank_group import world_group


@dataclass(frozen=True)
class LossAgreement:
    """Result of `all_reduce_losses`, the same on every rank."""

    loss: float  # mean over micro-batches and ranks; NaN if one of the losses is not finite
    stop_requested: bool  # some rank received a stop signal
    first_non_finite: tuple[int, int] | None  # rank and micro-batch of the first loss that is not finite


def all_reduce_losses(losses: list[torch.Tensor], stop_requested: bool) -> LossAgreement:
    """All-reduce this rank's micro-batch losses (scalars) and its stop request. Collective.

    The reduction sends 2 + world_size floats, and the host waits for the device once.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    own = torch.stack([loss.detach().float() for loss in losses])
    finite = own.isfinite()
    shared = torch.zeros(2 + world, device=own.device)
    shared[0] = own.nan_to_num(0.0, 0.0, 0.0).mean() / world
    shared[1] = float(stop_requested)
    # Each rank writes to its own slot the 1-based index of its first non-finite micro-batch, or 0 for none. argmin of
    # the 0/1 flags is the first 0.
    shared[2 + rank] = torch.where(finite.all(), 0, finite.int().argmin() + 1)
    world_group().all_reduce(shared)
    loss, stops, *firsts = shared.tolist()
    bad = next(((index, int(first) - 1) for index, first in enumerate(firsts) if first), None)
    return LossAgreement(loss if bad is None else float("nan"), stops > 0, bad)


def all_reduce_sum(values: list[float], device: torch.device) -> list[float]:
    """Return the elementwise sum over ranks, in double precision. Collective."""
    shared = torch.tensor(values, dtype=torch.float64, device=device)
    world_group().all_reduce(shared)
    return list(map(float, shared.tolist()))
