"""Starts fresh ranks for a piece of work and collects what each of them measured."""

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
    """What each of `nproc` fresh ranks measured, by rank; `env` is more of their environment.

    Raises:
        WindlassError: a rank failed; its own words are on stderr.
    """
    kind = next(name for name, one in TASK_TYPES.items() if isinstance(work, one))
    with tempfile.TemporaryDirectory(prefix="windlass-bench-") as folder:
        place = Path(folder)
        (place / "work.json").write_text(json.dumps({"kind": kind, "work": asdict(work)}))
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(nproc)))  # set, it is not announced every time
        code = launch([_RANK_MODULE, folder], nproc, module=True, env={"WINDLASS_LOG_LEVEL": "WARNING", **(env or {})})
        if code:
            raise WindlassError(f"a rank of this experiment ended with exit code {code}; its own words are above")
        return [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(nproc)]


def default_nproc() -> int:
    """One rank for each GPU, else two on the CPU: the fewest that have anything to share."""
    import torch

    return torch.cuda.device_count() or 2
