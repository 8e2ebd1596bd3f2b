"""Rank that trains a model at stage 3 on the tiers of a configuration, and reads the bytes on each tier."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from rig.job import Size
from windlass.cli.benches.rank_pool import RankPool

_TIMEOUT_S = 600.0
_DEVICE_BUDGET = "64G"


@dataclass(frozen=True)
class TieredJob:
    """Configuration of windlass, and the sizes of the model and its batches."""

    label: str
    config: dict[str, Any]
    size: Size


class TieredRank:
    """Worker of a `RankPool` for a `TieredJob`. Methods are commands; each is collective.

    Args:
        meeting: rendezvous URL of the ranks.
    """

    def __init__(self, job: TieredJob, rank: int, meeting: str) -> None:
        import torch
        import torch.distributed as dist
        import transformers

        import windlass
        from windlass.base.device_memory import emulated_device_memory
        from windlass.comm.bootstrap import init_distributed

        torch.set_num_threads(1)
        init_distributed("gloo", init_method=meeting)
        size = job.size
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size.plain()))
        self.parameters = sum(p.numel() for p in model.parameters())
        self._engine: Any = windlass.initialize(model=model, config=job.config)[0]
        self._torch, self._dist, self._size, self._rank, self._taken = torch, dist, size, rank, 0
        self._second_loss = 0.0
        device = emulated_device_memory()
        assert device is not None  # `start_tiered_ranks` sets WINDLASS_EMULATE_DEVICE
        self._device = device
        self._device.peak = self._device.used  # restart the peak after the construction

    def train(self, steps: int) -> dict[str, list[float]]:
        """Train. Return the seconds of each step on this rank."""
        found: dict[str, list[float]] = {"seconds": []}
        for _ in range(steps):
            draw = self._torch.Generator().manual_seed(1_000_003 * self._rank + self._taken)
            self._taken += 1
            tokens = self._torch.randint(
                0, self._size.vocabulary, (self._size.batch, self._size.length), generator=draw
            )
            self._dist.barrier()
            start = time.perf_counter()
            loss = self._engine(input_ids=tokens, labels=tokens).loss
            self._engine.backward(loss)
            self._engine.step()
            found["seconds"].append(time.perf_counter() - start)
            if self._taken == 2:
                self._second_loss = loss.item()
        return found

    def tiers(self) -> dict[str, Any]:
        """Return the peak bytes on the device since the construction, the bytes of slots on the other tiers (host: with
        the peak of staging buffers), the loss of the second step, and the number of parameters."""
        found: dict[str, Any] = {"device": self._device.peak, "host": 0, "nvme": 0}
        for (_, tier), size in self._engine.report()["slots"].items():
            if tier != "device":
                found[tier] += size
        staging = self._engine._sharded.tiers.staging
        if staging is not None:
            found["host"] += staging.peak
        return {**found, "second_loss": self._second_loss, "parameters": self.parameters}


def start_tiered_ranks(job: TieredJob, ranks: int) -> RankPool:
    """Start the ranks of a job, with an emulated device."""
    env = {"WINDLASS_EMULATE_DEVICE": _DEVICE_BUDGET, "WINDLASS_LOG_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
    return RankPool(partial(TieredRank, job), ranks, label=job.label, env=env, timeout_s=_TIMEOUT_S)
