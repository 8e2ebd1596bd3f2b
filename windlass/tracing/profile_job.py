"""Job of the ranks of `windlass profile`, and their start."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from windlass.base.errors import RunStoppedError, WindlassError
from windlass.base.text import plural
from windlass.launch.start_ranks import start_ranks


class ProfileRunError(WindlassError, RuntimeError):
    """Error of a run that ended before a profile was complete."""


@dataclass(frozen=True)
class ProfileJob:
    """One profile of a script.

    Attributes:
        folder: folder of the summary, which rank 0 writes, and of the error of a rank that fails.
        script: arguments of `python`: a path and the script's arguments.
        trace: file of the trace.
        steps: steps to record.
        skip: steps before the recorded ones, which warm up allocators, prefetchers and caches.
        config: configuration that overrides the script's own; a path or base64. None: no override.
        operators: record torch's operators too.
    """

    folder: str
    script: list[str] = field(default_factory=list)
    trace: str = "trace.json"
    steps: int = 3
    skip: int = 2
    config: str | None = None
    operators: bool = True

    @property
    def result_path(self) -> Path:
        """File of the summary."""
        return Path(self.folder, "summary.json")

    @property
    def failure_path(self) -> Path:
        """File in which the first rank that fails writes the reason."""
        return Path(self.folder, "failure")

    def write(self) -> Path:
        """Write the job into its folder and return the file."""
        path = Path(self.folder, "job.json")
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: str | Path) -> ProfileJob:
        """Read a job that `write` wrote."""
        return cls(**json.loads(Path(path).read_text()))


def run_profile(job: ProfileJob, ranks: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """Profile the script on `ranks` ranks of this machine. Return the summary as `text` and as plain `data`.

    Args:
        environment: variables to set for the ranks, over inherited ones.

    Raises:
        ProfileRunError: a rank failed, with its error as the text, or the script made no step.
        RunStoppedError: a signal stopped the run.
    """
    with tempfile.TemporaryDirectory(prefix="windlass-profile-") as folder:
        job = replace(job, folder=folder, trace=os.path.abspath(job.trace))
        outcome = start_ranks(["-m", "windlass.tracing.profile_rank", str(job.write())], ranks, env=environment)
        if outcome.stopped_by is not None:
            raise RunStoppedError("interrupted before the profile was complete", outcome.stopped_by)
        if job.failure_path.exists():
            reason = job.failure_path.read_text(encoding="utf-8")
            raise ProfileRunError(f"the run on {plural(ranks, 'rank')} failed:\n{reason}")
        if not job.result_path.exists():
            failures = "; ".join(str(failure) for failure in outcome.failures) or "no rank reported a reason"
            raise ProfileRunError(
                f"the run on {plural(ranks, 'rank')} wrote no profile: {failures}; see the output above"
            )
        found: dict[str, Any] = json.loads(job.result_path.read_text())
        return found
