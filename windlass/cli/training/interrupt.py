"""Turns Ctrl-C, SIGTERM and a hang-up into a wish to stop, which the loop meets after the step in hand."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

EXIT_CODE = 130
# The terminal and the launcher both pass on one Ctrl-C; only a later one is a second wish.
_SAME_WISH_SECONDS = 2.0
_WISHES = ("SIGINT", "SIGTERM", "SIGHUP")


class Interrupt:
    """The wish to stop; asked for again by Ctrl-C, after two seconds, the process ends at once.

    Args:
        failure: where a rank that fails leaves its message. Once that is there, SIGTERM is the launcher clearing up
            after the failed rank: peers that wait for it would wait for ever, so there is nothing to save.
    """

    def __init__(self, failure: Path | None = None) -> None:
        self.wanted = False
        self._since = 0.0
        self._failure = failure

    def install(self) -> None:
        """Takes over SIGINT, SIGTERM and SIGHUP of this process; a hang-up that `nohup` had ignored stays ignored."""
        for name in _WISHES:
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and (number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN):
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self._failure is not None and self._failure.exists():
            os._exit(1)
        if not self.wanted:
            self.wanted, self._since = True, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > _SAME_WISH_SECONDS:
            os._exit(EXIT_CODE)
