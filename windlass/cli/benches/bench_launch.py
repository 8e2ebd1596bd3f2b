"""Execution of one task on newly started ranks."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from windlass.cli.benches.bench_rank import TaskWorker
from windlass.cli.benches.bench_tasks import BenchTask
from windlass.cli.benches.rank_pool import RankPool
from windlass.launch.start_ranks import threads_per_rank


def run_task(work: BenchTask, nproc: int, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Run `work` on `nproc` newly started ranks. Return the measurements of every rank, in rank order.

    Args:
        env: variables to add to the environment of the ranks.

    Raises:
        WindlassError: a rank failed.
    """
    known = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(nproc)))}
    known["WINDLASS_LOG_LEVEL"] = "WARNING"
    with RankPool(partial(TaskWorker, work), nproc, label="this experiment", env={**known, **(env or {})}) as ranks:
        return ranks.ask("run")


def default_nproc() -> int:
    """Return the number of GPUs, or 2 without a GPU: the smallest number of ranks that has something to shard."""
    import torch

    return torch.cuda.device_count() or 2
