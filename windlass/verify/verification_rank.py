"""Program of each rank of a verification: `python -m windlass.verify.verification_rank JOB`."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path

from windlass.verify.verification_job import VerificationJob


def main(path: str) -> int:
    """Run one rank. Return 0 after a comparison, whatever its result, and 1 if nothing could be compared."""
    order = VerificationJob.read(path)
    os.dup2(2, 1)  # to stderr: output of the script must not mix with the report
    try:
        run_rank(order)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and not error.code):
            raise
        _write_failure(order, error)
        from windlass import watchdog

        watchdog.report_failure(error)
        return 1
    return 0


def run_rank(job: VerificationJob) -> None:
    """Train the script or model of `job` in this process, compare its steps, and write the report on rank 0.

    Raises:
        VerifyError: the training ended without a step.
    """
    from windlass.engine.initialize_observer import install_observer
    from windlass.verify import named_model_training
    from windlass.verify.engine_verifier import VerifyError
    from windlass.verify.verification_session import VerificationFinished, VerificationSession

    session = VerificationSession(job)
    before = install_observer(session)
    try:
        if job.script:
            _run_script(job.script)
        else:
            named_model_training.train_named_model(job)
    except VerificationFinished:
        return
    finally:
        install_observer(before)
    if not session.verifiers:
        raise VerifyError(
            "the script ended without an engine that has an optimizer: windlass.initialize(model=..., config=...)"
        )
    if not session.verifiers[0].compared_steps:
        raise VerifyError("the script ended before its first engine.step() at an accumulation boundary")
    session.note_early_end()
    session.write_result()


def _run_script(arguments: list[str]) -> None:
    import windlass
    from windlass.verify.verification_session import VerificationFinished

    # for scripts that import deepspeed; an installed and imported deepspeed has precedence
    sys.modules.setdefault("deepspeed", windlass)
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code or isinstance(ended, VerificationFinished):
            raise


def _write_failure(job: VerificationJob, error: BaseException) -> None:
    """Write the first failure of all ranks. Later failures are consequences of it."""
    from windlass.base.errors import WindlassError

    rank = os.environ.get("RANK", "0")
    text = str(error) if isinstance(error, WindlassError) else f"{type(error).__name__}: {error}"
    if os.environ.get("WINDLASS_DEBUG", "0") not in ("", "0") or not isinstance(error, WindlassError):
        traceback.print_exc()
    try:
        with open(job.failure_path, "x") as stream:
            stream.write(f"rank {rank}: {text}")
    except FileExistsError:  # another rank failed first
        return


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A rank that failed must not wait at exit for peers that are still in a collective.
    os._exit(code)
