"""Starts fresh ranks for a piece of work and collects what each of them measured."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from windlass.base.errors import WindlassError
from windlass.cli.benches.work import KINDS, Work
from windlass.launch.run import launch, threads_per_rank

_RANK = "windlass.cli.benches.rank"


def measure(work: Work, nproc: int, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """What each of `nproc` fresh ranks measured, by rank; `env` is more of their environment.

    Raises:
        WindlassError: a rank failed; its own words are on stderr.
    """
    kind = next(name for name, one in KINDS.items() if isinstance(work, one))
    with tempfile.TemporaryDirectory(prefix="windlass-bench-") as folder:
        place = Path(folder)
        (place / "work.json").write_text(json.dumps({"kind": kind, "work": asdict(work)}))
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(nproc)))  # set, it is not announced every time
        code = launch([_RANK, folder], nproc, module=True, env={"WINDLASS_LOG_LEVEL": "WARNING", **(env or {})})
        if code:
            raise WindlassError(f"a rank of this experiment ended with exit code {code}; its own words are above")
        return [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(nproc)]


def default_ranks() -> int:
    """One rank for each GPU, else two on the CPU: the fewest that have anything to share."""
    import torch

    return torch.cuda.device_count() or 2
