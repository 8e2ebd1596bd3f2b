"""Processes of this host: their environment and state, their descendants, and the exit code of the watchdog."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

WATCHDOG_EXIT_CODE = 86
"""Exit code of a rank that its watchdog ended. The cause is in the hang report, and usually on another rank."""


class SignalInterrupt(KeyboardInterrupt):
    """Request to end the program by a signal, with the cleanup of Ctrl-C and the exit code of the signal.

    Attributes:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def interrupting_signal(error: KeyboardInterrupt) -> int:
    """Return the number of the signal that raised `error`: SIGINT, unless `error` names another."""
    return error.number if isinstance(error, SignalInterrupt) else int(signal.SIGINT)


def forbid_world_writable_files() -> None:
    """Make new files of this process and its children not world-writable, even under umask 000."""
    before = os.umask(0o077)
    os.umask(before | 0o002)


@contextlib.contextmanager
def exit_on_interrupted_import() -> Iterator[None]:
    """Make Ctrl-C end the process at once, with exit code 130, while a module is being imported.

    A C extension that imports a module ignores every exception of that import, also a KeyboardInterrupt (torch imports
    numpy in this way): the program would continue with half a module. Outside of imports Ctrl-C raises
    KeyboardInterrupt. Does nothing if SIGINT is handled or ignored already, or outside the main thread.
    """
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not own or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                os._exit(128 + number)
            frame = frame.f_back
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def temporary_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the context, also for processes that it starts; restore all afterwards."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def is_alive(pid: int) -> bool:
    """Return True if a process exists and has not ended.

    A zombie has ended. Outside Linux it still counts as alive, until its parent has waited for it.
    """
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
    """Return True if a process is stopped (SIGSTOP, Ctrl-Z, a debugger) and may be continued. Linux only."""
    return _process_state(pid) in ("T", "t")


def descendants(pid: int) -> dict[int, str]:
    """Return the processes that a process started, directly or indirectly, with their start times. Linux only.

    The start time distinguishes a process from a later one with the same number. Orphaned processes are not included.
    """
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        for tasks in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                children = [int(child) for child in tasks.read_text().split()]
                found |= {child: start_time_of(child) for child in children}
                waiting += children
    return found


def start_time_of(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; "" if there is no such process. Linux only."""
    return next(iter(_stat_fields(pid)[19:20]), "")


def _process_state(pid: int) -> str:
    """Return the state letter of /proc/PID/stat; empty if there is no such process."""
    return next(iter(_stat_fields(pid)), "")


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process name; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return []
