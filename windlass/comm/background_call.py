"""Communication on a background thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from windlass.base.collective_activity import WaitScope


class BackgroundCall:
    """Runs a function on a background thread.

    Args:
        act: the function.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="windlass-drain", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the function, and raise the error that it raised."""
        with WaitScope("the transfers of a schedule that failed"):
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._act()
        except Exception as error:
            self._error = error
