"""mpirun, srun or pdsh as this launch's one child: looked after as a rank is, so that it ends with the launcher."""

from __future__ import annotations

import os
import re
import selectors
import sys
import time
from dataclasses import replace

from windlass.launch import reaper
from windlass.launch.back_ends import Command
from windlass.launch.conduct import Events, conduct, signals_taken
from windlass.launch.console import write
from windlass.launch.outcome import Failure, Outcome
from windlass.launch.plan import Plan
from windlass.launch.ranks import ERR, Job, Ranks

# pdsh says so when a host is done, and goes on waiting for the others.
_HOST_FAILED = re.compile(rb"^pdsh@[^:\n]*: (\S+): ssh exited with exit code (\d+)$", re.MULTILINE)


class _Pdsh(Events):
    """Hands on what pdsh writes, and takes the end of one host for a failure of all."""

    def __init__(self) -> None:
        super().__init__(None)
        self._rest = b""

    def wrote(self, rank: int, stream: str, data: bytes) -> None:
        write(stream, data)
        if stream == ERR:
            text, _, self._rest = (self._rest + data).rpartition(b"\n")
            for match in _HOST_FAILED.finditer(text):
                self.failures.append(Failure(0, int(match[2]), time.time(), match[1].decode()))


def run_starter(command: Command, plan: Plan) -> Outcome:
    """Execute `command` and bring back how it ended. What failed was told by the ranks, and by itself."""
    is_pdsh = command.words[0] == "pdsh"
    events = _Pdsh() if is_pdsh else Events(None)
    with signals_taken(plan.signals) as received, selectors.DefaultSelector() as selector:
        words = command.words
        if sys.platform == "linux":  # pdsh leaves its connections behind when it is killed
            words = [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), *words]
        ranks = Ranks([Job(0, words, {**os.environ, **command.environment})], events, selector, capture=is_pdsh)
        outcome = conduct([ranks], events, selector, received, grace_s=plan.grace_s)
    return replace(outcome, failures=())
