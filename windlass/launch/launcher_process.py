"""Supervision of mpirun, srun or pdsh as the launcher's only child, like a rank. The child ends with the launcher."""

from __future__ import annotations

import os
import re
import selectors
import sys
import time
from dataclasses import replace

from windlass.launch import reaper
from windlass.launch.exit_status import LaunchExitStatus, RankFailure
from windlass.launch.launch_plan import LaunchPlan
from windlass.launch.launcher_backends import LauncherCommand
from windlass.launch.rank_output import write_stream
from windlass.launch.rank_processes import ERR, RankJob, RankProcesses
from windlass.launch.supervisor import RankEvents, capture_signals, supervise

# pdsh writes this line when one host ends, and continues to wait for the others.
_PDSH_HOST_FAILURE = re.compile(rb"^pdsh@[^:\n]*: (\S+): ssh exited with exit code (\d+)$", re.MULTILINE)


class _PdshEvents(RankEvents):
    """Events of pdsh: forwards its output, and treats the failure of one host as a failure of the run."""

    def __init__(self) -> None:
        super().__init__(None)
        self._partial_line = b""

    def on_output(self, rank: int, stream: str, data: bytes) -> None:
        write_stream(stream, data)
        if stream == ERR:
            text, _, self._partial_line = (self._partial_line + data).rpartition(b"\n")
            for match in _PDSH_HOST_FAILURE.finditer(text):
                self.failures.append(RankFailure(0, int(match[2]), time.time(), match[1].decode()))


def run_launcher_command(command: LauncherCommand, plan: LaunchPlan) -> LaunchExitStatus:
    """Run `command` and return its exit status, without failures: the ranks and the command have printed them."""
    is_pdsh = command.argv[0] == "pdsh"
    events = _PdshEvents() if is_pdsh else RankEvents(None)
    with capture_signals(plan.signals) as received, selectors.DefaultSelector() as selector:
        words = command.argv
        if sys.platform == "linux":  # a killed pdsh leaves its ssh connections behind; the reaper ends them
            words = [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), *words]
        ranks = RankProcesses([RankJob(0, words, {**os.environ, **command.env})], events, selector, capture=is_pdsh)
        outcome = supervise([ranks], events, selector, received, grace_s=plan.grace_s)
    return replace(outcome, failures=())
