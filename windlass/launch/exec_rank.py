"""First program of each rank: has the kernel kill the process when its launcher ends, then becomes the user's program.

Run as `python -I -S exec_rank.py LAUNCHER_PID COMMAND...`. It imports only the standard library, because it runs before
every rank, and then replaces itself by COMMAND. The death signal and the core binding survive the exec.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CORES = "WINDLASS_CORES"  # same as `core_binding.CORES_VARIABLE`


def main(launcher: int, command: list[str]) -> None:
    """Tie this process to `launcher`, its parent, and exec `command`. Linux only."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C then ends the process without a traceback
    import ctypes  # imported late, because the import takes as long as everything else here

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # the launcher ended before the prctl call, so no signal will come
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
