"""Turns Ctrl-C and SIGTERM into a wish to stop, which the loop meets after the step in hand."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

EXIT_CODE = 130
# The terminal and the launcher both pass on one Ctrl-C; only a later one is a second wish.
_SAME_WISH_SECONDS = 2.0


class Interrupt:
    """The wish to stop; asked for again, after two seconds, the process ends at once."""

    def __init__(self) -> None:
        self.wanted = False
        self._since = 0.0

    def install(self) -> None:
        """Takes over SIGINT and SIGTERM of this process."""
        signal.signal(signal.SIGINT, self._receive)
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.wanted:
            self.wanted, self._since = True, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > _SAME_WISH_SECONDS:
            os._exit(EXIT_CODE)
