"""Launch of fresh ranks for one task, and the measurements of each rank."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from windlass.base.errors import WindlassError
from windlass.cli.benches.bench_tasks import TASK_TYPES, BenchTask
from windlass.launch.start_ranks import launch, threads_per_rank

_RANK_MODULE = "windlass.cli.benches.bench_rank"


def run_task(work: BenchTask, nproc: int, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Run `work` on `nproc` fresh ranks. Return the measurements of each rank, by rank.

    Args:
        env: variables to add to the environment of the ranks.

    Raises:
        WindlassError: a rank failed. Its error is on stderr.
    """
    kind = next(name for name, one in TASK_TYPES.items() if isinstance(work, one))
    with tempfile.TemporaryDirectory(prefix="windlass-bench-") as folder:
        place = Path(folder)
        (place / "work.json").write_text(json.dumps({"kind": kind, "work": asdict(work)}))
        # if it were not set, the launcher would log its choice at each launch
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(nproc)))
        code = launch([_RANK_MODULE, folder], nproc, module=True, env={"WINDLASS_LOG_LEVEL": "WARNING", **(env or {})})
        if code:
            raise WindlassError(f"a rank of this experiment ended with exit code {code}; its error is printed above")
        return [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(nproc)]


def default_nproc() -> int:
    """Return the number of GPUs, or 2 without a GPU: the smallest number of ranks that has something to shard."""
    import torch

    return torch.cuda.device_count() or 2
