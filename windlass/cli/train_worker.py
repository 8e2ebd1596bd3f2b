"""What each rank of `windlass train` starts as: `python -m windlass.cli.train_worker PLAN FAILURE`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main(plan_path: str, failure_path: str) -> int:
    """Runs one rank; the exit code is 0, 1 after a failure, or 130 when it was asked to stop."""
    # Until there is something to save, a signal ends the rank at once, without a traceback and inside C++ too: a rank
    # that waits for a peer that is gone would otherwise wait until it is killed. See Interrupt for the time after.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from windlass.cli.training.train_rank import run_rank

    return run_rank(Path(plan_path), Path(failure_path))


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A rank that failed must not wait at exit for peers that are still in a collective.
    os._exit(code)
