"""What a rank is before it becomes the user's program: a process that asked the kernel to end it with its launcher.

Run as `python -I -S rank.py LAUNCHER_PID COMMAND...`. It imports nothing outside the standard library, since it runs
before every rank, and then replaces itself by COMMAND: the request survives that, and so do the cores it is bound to.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CORES = "WINDLASS_CORES"  # as `launch.cores` names it


def main(launcher: int, command: list[str]) -> None:
    """Tie this process to `launcher`, its parent, and become `command`; Linux only."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C now ends it without a traceback
    import ctypes  # only then: it takes as long as all the rest

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it ended before the request was made
        os._exit(128 + signal.SIGKILL)
    if os.environ.get(_CORES):
        os.sched_setaffinity(0, [int(core) for core in os.environ[_CORES].split(",")])
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"windlass: {command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
