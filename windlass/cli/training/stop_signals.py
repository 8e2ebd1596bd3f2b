"""Conversion of Ctrl-C, SIGTERM and SIGHUP to a stop request, which the training loop checks after each step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

INTERRUPTED_EXIT_CODE = 130
# The terminal and the launcher both deliver the same Ctrl-C; only a Ctrl-C after this time is a second request.
_SAME_REQUEST_SECONDS = 2.0
_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


class StopSignals:
    """Stop request of this process. A Ctrl-C more than two seconds after the first signal ends the process at once.

    Args:
        failure_path: file to which a failing rank writes its message. Once this file exists, SIGTERM ends the process
            at once: the launcher sends it to the remaining ranks, which would wait forever for the failed peer.
    """

    def __init__(self, failure_path: Path | None = None) -> None:
        self.stop_requested = False
        self._requested_at = 0.0
        self._failure_path = failure_path

    def install(self) -> None:
        """Install handlers for SIGINT, SIGTERM and SIGHUP. Ignored signals except SIGINT, such as SIGHUP under `nohup`,
        stay ignored."""
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
