"""Start and stop of the process's single watchdog."""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType

import torch.distributed as dist

from windlass.base.collective_activity import activity
from windlass.base.log import logger
from windlass.base.processes import WATCHDOG_EXIT_CODE
from windlass.watchdog.control_store import ControlStore
from windlass.watchdog.watchdog_limits import WatchdogLimits
from windlass.watchdog.watchdog_thread import WatchdogThread

_watchdog: WatchdogThread | None = None
_hooks_installed = False


def start(limits: WatchdogLimits | None) -> None:
    """Watch the ranks of the default group from now on, or change the limits if they are watched already.

    Every rank calls this; the call does not wait for other ranks. With one rank, or without a TCP store that can be
    reached, nothing is watched.

    Args:
        limits: time limits; None: stop watching.
    """
    global _watchdog
    if _watchdog is not None and (limits is None or not _watchdog.is_running):
        _watchdog.stop(program_ended=False)
        _watchdog, activity.is_watched, activity.pending_collective = None, False, None
    if limits is None or dist.get_world_size() == 1:
        return
    if _watchdog is not None:
        _watchdog.set_limits(limits)
        return
    board = ControlStore.open()
    if board is None:
        logger.debug("no watchdog: the process group does not use a TCP store, or has no connection left")
        return
    # rank whose process serves the store; None: torch's launcher serves it
    keeper = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
    _watchdog = WatchdogThread(board, dist.get_rank(), dist.get_world_size(), limits, keeper)
    activity.is_watched = True
    _install_hooks()


def report_failure(error: BaseException) -> None:
    """Publish `error`, which ends this rank's program, as the cause of the run's end.

    For callers that print the error themselves and so bypass `sys.excepthook`.
    """
    if _watchdog is not None and _watchdog.is_running and not _watchdog.is_decided:
        _watchdog.record_failure(error, error.__traceback__)
        if not _watchdog.failed_in_wait:
            _watchdog.wait_for_decision()


def _install_hooks() -> None:
    """Install hooks for the program's end and for uncaught exceptions."""
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    atexit.register(_stop_at_exit)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        watch = _watchdog
        if watch is None or not watch.is_running or isinstance(error, KeyboardInterrupt):
            before(kind, error, trace)
            return
        if not watch.is_decided:
            watch.record_failure(error, trace)
        if watch.is_decided or watch.failed_in_wait:  # another rank caused this error: wait for its report
            watch.wait_for_decision()
            if watch.is_decided:
                logger.error("this error ended the rank: %s: %s", kind.__name__, error)
                sys.exit(WATCHDOG_EXIT_CODE)
            before(kind, error, trace)
        else:
            before(kind, error, trace)
            watch.wait_for_decision()

    sys.excepthook = hook


def _stop_at_exit() -> None:
    if _watchdog is None:
        return
    # Python sets last_value before it calls excepthook, which another library (coloured tracebacks) may have replaced.
    error = getattr(sys, "last_value", None)
    if isinstance(error, Exception) and not _watchdog.program_ended:
        report_failure(error)
    _watchdog.stop(program_ended=True)
