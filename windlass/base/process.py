"""Whether a process of this host is there, and what it ends with when its watchdog ends it."""

from __future__ import annotations

import os
import sys

ENDED_BY_WATCHDOG = 86
"""Exit code of a rank that its watchdog ended: the cause is in the report, and as a rule with another rank."""


def is_alive(pid: int) -> bool:
    """Whether a process runs, or could: one that ended and that nobody has asked for its exit code does not."""
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
    return _state(pid) not in ("", "Z", "X")


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped (SIGSTOP, Ctrl-Z, a debugger) and may be continued; known on Linux only."""
    return _state(pid) in ("T", "t")


def _state(pid: int) -> str:
    """The letter of /proc/PID/stat; empty where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""
