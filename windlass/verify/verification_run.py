"""Start of the ranks of a verification, and collection of rank 0's report."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from windlass.base.errors import RunStoppedError, WindlassError
from windlass.base.text import plural
from windlass.compat.stand_in_path import stand_in_environment
from windlass.launch.script_session import rank_import_path
from windlass.launch.start_ranks import start_ranks
from windlass.verify.verification_job import VerificationJob
from windlass.verify.verification_report import VerificationReport


class VerificationRunError(WindlassError, RuntimeError):
    """Error of a run that ended before anything could be compared."""


def run_verification(job: VerificationJob, ranks: int) -> list[VerificationReport]:
    """Run `job` on `ranks` ranks of this machine. Return the report of each engine, in order of construction.

    Raises:
        VerificationRunError: a rank failed (the message is the error of that rank), or no report was written.
        RunStoppedError: a signal stopped the run.
    """
    with tempfile.TemporaryDirectory(prefix="windlass-verify-") as folder:
        job = replace(job, folder=folder)
        environment = stand_in_environment({"PYTHONPATH": rank_import_path()})
        outcome = start_ranks(["-m", "windlass.verify.verification_rank", str(job.write())], ranks, env=environment)
        if outcome.stopped_by is not None:
            raise RunStoppedError("interrupted before the report was complete", outcome.stopped_by)
        if job.failure_path.exists():
            raise VerificationRunError(
                f"the run on {plural(ranks, 'rank')} failed, so there is nothing to compare:\n{_read(job.failure_path)}"
            )
        if not job.result_path.exists():
            failures = "; ".join(str(failure) for failure in outcome.failures) or "no rank reported a reason"
            raise VerificationRunError(
                f"the run on {plural(ranks, 'rank')} wrote no report: {failures}; see the output above"
            )
        return [VerificationReport.from_dict(one) for one in json.loads(_read(job.result_path))]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
