"""One watchdog a process, from the first engine to the end of the program."""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType

import torch.distributed as dist

from windlass.base.activity import activity
from windlass.base.log import logger
from windlass.base.process import ENDED_BY_WATCHDOG
from windlass.watchdog.board import Board
from windlass.watchdog.settings import Limits
from windlass.watchdog.watch import Watch

_watch: Watch | None = None
_installed = False


def start(limits: Limits | None) -> None:
    """Watch the ranks of the default group from now on; with other limits if they are watched already. Every rank calls
    it, and nobody waits for anybody.

    Args:
        limits: None: do not watch.
    """
    global _watch
    if _watch is not None and (limits is None or not _watch.watches):
        _watch.stop(through=False)
        _watch, activity.watched, activity.under_way = None, False, None
    if limits is None or dist.get_world_size() == 1:
        return
    if _watch is not None:
        _watch.use(limits)
        return
    board = Board.open()
    if board is None:
        logger.debug("no watchdog: the ranks did not meet at a TCP store")
        return
    # torch's launcher keeps the store itself; elsewhere rank 0 does
    keeper = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
    _watch = Watch(board, dist.get_rank(), dist.get_world_size(), limits, keeper)
    activity.watched = True
    _install()


def failed(error: BaseException) -> None:
    """This rank's program is about to end by `error`, which it tells itself, and past the hook of exceptions: the other
    ranks shall know it for the cause."""
    if _watch is not None and _watch.watches and not _watch.decided:
        _watch.failed(error, error.__traceback__)
        if not _watch.was_cut_off:
            _watch.await_decision()


def _install() -> None:
    """Hear of the program's end, and of the exception that ends it."""
    global _installed
    if _installed:
        return
    _installed = True
    atexit.register(_stop)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        watch = _watch
        if watch is None or not watch.watches or isinstance(error, KeyboardInterrupt):
            before(kind, error, trace)
            return
        if not watch.decided:
            watch.failed(error, trace)
        if watch.decided or watch.was_cut_off:  # the cause first: it is another rank's
            watch.await_decision()
            if watch.decided:
                logger.error("this rank ended of it: %s: %s", kind.__name__, error)
                sys.exit(ENDED_BY_WATCHDOG)
            before(kind, error, trace)
        else:
            before(kind, error, trace)
            watch.await_decision()

    sys.excepthook = hook


def _stop() -> None:
    if _watch is None:
        return
    # Python keeps it before it calls the hook, which others (tracebacks in colour) may have put in the place of ours
    error = getattr(sys, "last_value", None)
    if isinstance(error, Exception) and not _watch.through:
        failed(error)
    _watch.stop(through=True)
