"""Rank of a training method, pinned to a core, that trains on command."""

from __future__ import annotations

import os
import time
from typing import Any

from rig.compared_methods import FIELDS, RANKS, SIZES, Load
from rig.job import Job
from rig.models import samples
from rig.worker import Worker


def pin(rank: int) -> None:
    """Pin this process, and the processes that it starts, to one core."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


class MethodRank(Worker):
    """Worker of a `RankPool` for the training method that the job's `engine` names as AXIS/NAME."""

    def __init__(self, job: Job, rank: int, meeting: str) -> None:
        pin(rank)
        super().__init__(job, rank, meeting)
        axis, name = job.engine.split("/")
        self._one = FIELDS[axis][name]
        self._sizes = self._one.sizes or SIZES[axis]
        self._apart: Any = None  # model for `compute`, which is not trained
        self._load = Load(job.size.batch, job.size.length)

    def build(self, watch: bool = False) -> dict[str, Any]:
        """Build the model and its training method."""
        from rig.training_methods import make

        self._step = make(self._one, self._sizes, self._load)
        return {}

    def steps(self, count: int) -> dict[str, Any]:
        """Train `count` steps.

        Returns:
            For each step its seconds from a barrier until this rank has the loss as a number, the CPU seconds of this
            process, and its loss; None if this rank has no loss.
        """
        results: dict[str, Any] = {"seconds": [], "busy": [], "losses": []}
        for _ in range(count):
            tokens = self._batch()
            self._dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            loss = self._step(tokens)
            results["losses"].append(None if loss is None else loss.item())
            results["seconds"].append(time.perf_counter() - start)
            results["busy"].append(time.process_time() - busy)
            del loss
        return results

    def pace(self, rate: int) -> int:
        """Call `rig.link.pace` for the existing connections."""
        from rig.link import pace

        return pace(rate)

    def memory(self) -> int | None:
        """Return the memory of this rank, with its share of memory that both ranks map."""
        from windlass.observe.memory_usage import proportional_bytes

        return proportional_bytes()

    def compute(self, count: int) -> list[float]:
        """Return the seconds of forward and backward of half the samples, without communication or update."""
        from rig.models import build

        self._apart = self._apart or build(self._sizes)
        model, result = self._apart, []
        for _ in range(count):
            tokens = self._batch()
            self._dist.barrier()
            start = time.perf_counter()
            model(input_ids=tokens, labels=tokens).loss.backward()
            result.append(time.perf_counter() - start)
            model.zero_grad(set_to_none=True)
        return result

    def _batch(self) -> Any:
        """Return this rank's tokens of the next global batch, which is the same for every method."""
        tokens = samples(self._sizes.vocabulary, self._load.samples, self._load.length, 1000 + self._taken)
        self._taken += 1
        return tokens if self._one.whole else tokens.chunk(RANKS)[self._rank]
