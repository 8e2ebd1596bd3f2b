"""Program of each rank of `windlass profile`: `python -m windlass.tracing.profile_rank JOB`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from windlass.base.atomic_file import write_atomically
from windlass.base.errors import ModelError
from windlass.engine.initialize_observer import InitializeObserver, install_observer
from windlass.engine.training_engine import Engine
from windlass.launch.script_session import is_plain_end, record_script_failure, run_script
from windlass.tracing.profile_job import ProfileJob
from windlass.tracing.trace_profiler import TraceProfiler, gather_profiles, save_trace


class ProfileFinished(SystemExit):
    """Exception that ends the script on all ranks after enough steps were recorded."""


class ProfileSession(InitializeObserver):
    """Profile of a script's first engine with an optimizer."""

    def __init__(self, job: ProfileJob) -> None:
        self.job, self.config_override = job, job.config
        self.profiler: TraceProfiler | None = None

    def after_initialize(self, engine: Engine) -> None:
        """Observe `engine` from now on, if it is the first one with an optimizer."""
        if self.profiler is not None or engine.optimizer is None:
            return
        self.profiler = TraceProfiler(engine, operators=self.job.operators, after_step=self._follow)
        if not self.job.skip:
            self.profiler.start()

    def _follow(self, profiler: TraceProfiler) -> None:
        """Start to record after the skipped steps, and end the script once enough steps are recorded."""
        if profiler.is_recording and profiler.recorded_steps == self.job.steps:
            self.finish(profiler)
            raise ProfileFinished(0)
        if not profiler.is_recording and profiler.seen_steps == self.job.skip:
            profiler.start()

    def finish(self, profiler: TraceProfiler) -> None:
        """Write the trace and the summary on rank 0. Collective.

        Raises:
            TraceFileError: the trace cannot be written.
        """
        run = gather_profiles(profiler.stop())
        if run is not None:
            save_trace(run, Path(self.job.trace))
            result = {"text": run.summary(), "data": run.as_json()}
            write_atomically(self.job.result_path, json.dumps(result))

    def finish_early(self) -> None:
        """Write the profile of a script that has ended before the requested number of steps. Collective.

        Raises:
            ModelError: no engine had an optimizer, no step was recorded, or the script destroyed its process group.
        """
        profiler = self.profiler
        if profiler is None:
            raise ModelError(
                "the script ended without an engine that has an optimizer; call windlass.initialize(model=..., "
                "config=...) in it"
            )
        if not profiler.recorded_steps:
            raise ModelError(
                f"the script ended after {profiler.seen_steps} steps, and the profile begins after --skip "
                f"{self.job.skip}; lower --skip, or train longer"
            )
        if not dist.is_initialized():
            raise ModelError(
                f"the script destroyed its process group, over which ranks send their profiles, after "
                f"{profiler.recorded_steps} of {self.job.steps} recorded steps; pass --steps {profiler.recorded_steps}"
            )
        self.finish(profiler)


def main(path: str) -> int:
    """Run one rank. Return 0 after a profile, and 1 if there is none."""
    job = ProfileJob.read(path)
    os.dup2(2, 1)  # to stderr: output of the script must not mix with the summary
    try:
        profile_script(job)
    except BaseException as error:
        if is_plain_end(error):
            raise
        record_script_failure(job.failure_path, error)
        from windlass import watchdog

        watchdog.report_failure(error)
        return 1
    return 0


def profile_script(job: ProfileJob) -> None:
    """Run the script of `job` in this process, and record its steps.

    Raises:
        ModelError: no engine had an optimizer, or the script made no step that was to be recorded.
    """
    # `python -m` loads this module as __main__. Import it again under its name, so that the session raises the class
    # that is caught here.
    from windlass.tracing.profile_rank import ProfileFinished, ProfileSession

    session = ProfileSession(job)
    before = install_observer(session)
    try:
        run_script(job.script)
    except ProfileFinished:
        return
    finally:
        install_observer(before)
    session.finish_early()


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A rank that failed must not wait at exit for peers that are still in a collective.
    os._exit(code)
