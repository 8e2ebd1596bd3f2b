"""Processes of this host: whether one is there, which it started, what it ends with when its watchdog ends it."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

WATCHDOG_EXIT_CODE = 86
"""Exit code of a rank that its watchdog ended: the cause is in the report, and as a rule with another rank."""


def forbid_world_writable_files() -> None:
    """Have files that this process and its children create not be writable by every user, even under umask 000."""
    before = os.umask(0o077)
    os.umask(before | 0o002)


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
    return _process_state(pid) not in ("", "Z", "X")


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped (SIGSTOP, Ctrl-Z, a debugger) and may be continued; known on Linux only."""
    return _process_state(pid) in ("T", "t")


def descendants(pid: int) -> dict[int, str]:
    """The processes that a process started, and theirs, each with the moment of its start, which tells it from a later
    one of the same number; Linux only. Those that lost their parent are no longer among them."""
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        for tasks in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                children = [int(child) for child in tasks.read_text().split()]
                found |= {child: start_time_of(child) for child in children}
                waiting += children
    return found


def start_time_of(pid: int) -> str:
    """When a process was started, in the system's own count; empty where there is no such process. Linux only."""
    return next(iter(_stat_fields(pid)[19:20]), "")


def _process_state(pid: int) -> str:
    """The letter of /proc/PID/stat; empty where there is no such process."""
    return next(iter(_stat_fields(pid)), "")


def _stat_fields(pid: int) -> list[str]:
    """What /proc/PID/stat says behind the name; empty where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return []
