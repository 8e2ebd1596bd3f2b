"""Parent process that kills the processes that its child leaves behind, if a signal ended the child or this process
received one.

As a subreaper this process adopts orphans of its descendants (Linux). `python -I -S reaper.py LAUNCHER_PID COMMAND...`
runs COMMAND as the child. If the launcher ends, COMMAND gets SIGTERM, and its orphans are killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def continue_in_child() -> None:
    """Fork and return in the child. The parent waits for the child, and kills all orphans if a signal ended the child
    or reached the parent."""
    parent = os.getpid()
    child = os.fork()
    if child:
        _wait_for_child(child)
    _die_with_parent(parent, signal.SIGKILL)


def main(launcher: int, command: list[str]) -> NoReturn:
    """Run `command`. When `launcher`, the parent of this process, ends, also end `command` and the processes that it
    started."""
    parent = os.getpid()
    child = os.fork()
    if not child:
        _die_with_parent(parent, signal.SIGTERM)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"windlass: {command[0]}: {error.strerror}", file=sys.stderr)
            os._exit(127)
    _wait_for_child(child, launcher)


def _wait_for_child(child: int, launcher: int | None = None) -> NoReturn:
    signalled: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        signalled.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, pass_on)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if launcher is not None:
        _die_with_parent(launcher, signal.SIGTERM)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            break
    code = os.waitstatus_to_exitcode(status)
    if code < 0 or signalled:
        _kill_children()
    os._exit(code if code >= 0 else 128 - code)


def _kill_children() -> None:
    """Kill children until there are none: the children of each killed process become children of this one."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            left = [int(pid) for pid in file.read().split()]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _die_with_parent(parent: int, signal_number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the prctl call, so no signal will come
        os.kill(os.getpid(), signal_number)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
