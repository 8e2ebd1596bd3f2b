"""Turns Ctrl-C, SIGTERM and a hang-up into a wish to stop, which the loop meets after the step in hand."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

INTERRUPTED_EXIT_CODE = 130
# The terminal and the launcher both pass on one Ctrl-C; only a later one is a second wish.
_SAME_REQUEST_SECONDS = 2.0
_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


class StopSignals:
    """The wish to stop; asked for again by Ctrl-C, after two seconds, the process ends at once.

    Args:
        failure: where a rank that fails leaves its message. Once that is there, SIGTERM is the launcher clearing up
            after the failed rank: peers that wait for it would wait for ever, so there is nothing to save.
    """

    def __init__(self, failure_path: Path | None = None) -> None:
        self.stop_requested = False
        self._requested_at = 0.0
        self._failure_path = failure_path

    def install(self) -> None:
        """Takes over SIGINT, SIGTERM and SIGHUP of this process; a hang-up that `nohup` had ignored stays ignored."""
        for name in _STOP_SIGNALS:
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and (number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN):
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self._failure_path is not None and self._failure_path.exists():
            os._exit(1)
        if not self.stop_requested:
            self.stop_requested, self._requested_at = True, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._requested_at > _SAME_REQUEST_SECONDS:
            os._exit(INTERRUPTED_EXIT_CODE)
