"""Program of each rank of `windlass train`: `python -m windlass.cli.train_worker PLAN FAILURE`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main(plan_path: str, failure_path: str) -> int:
    """Run one rank. Return the exit code: 0, 1 after a failure, or 130 after a request to stop."""
    # Until there is something to save, SIGINT must end the rank at once, without a traceback and even inside C++ code.
    # Otherwise a rank that waits for a dead peer would wait until it is killed. StopSignals handles the time after.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from windlass.cli.training.train_rank import run_rank

    return run_rank(Path(plan_path), Path(failure_path))


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # os._exit skips exit handlers, in which a failed rank would wait for peers that are still in a collective.
    os._exit(code)
