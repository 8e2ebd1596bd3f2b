"""Trials in forks of this process, which has imported everything, so that a trial costs little more than its steps."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from windlass.launch.local_launch import free_port
from windlass.tune.trial_process import TrialEnd, find_error


class ForkedTrials:
    """Runner of a search (`TuningRun.runner`).

    Args:
        ranks: Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def __call__(
        self, command: Sequence[str], folder: Path, environ: Mapping[str, str], limit_s: float, result: Path
    ) -> TrialEnd:
        started, port = time.monotonic(), free_port()
        left = {self._fork(command, folder, environ, rank, port) for rank in range(self._ranks)}
        code: int | None = 0
        while left:
            for pid in list(left):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    left.discard(pid)
                    code = code or os.waitstatus_to_exitcode(status)
            if (time.monotonic() - started > limit_s or code) and left:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        error = "" if result.is_file() else find_error((folder / "stderr.log").read_text())
        return TrialEnd(code, error, "memory" in error, (), time.monotonic() - started)

    def _fork(self, command: Sequence[str], folder: Path, environ: Mapping[str, str], rank: int, port: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            for number, name in ((1, "stdout.log"), (2, "stderr.log")):
                os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
            os.environ.clear()
            os.environ.update(environ)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self._ranks)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            sys.argv = list(command)
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
