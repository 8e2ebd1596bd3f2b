"""Call of a function on a background thread, for transfers that finish while the main thread communicates."""

from __future__ import annotations

import threading
from collections.abc import Callable

from windlass.base.collective_activity import WaitScope


class BackgroundCall:
    """Function call on a background thread, which the constructor starts."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="windlass-drain", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the call, and raise its exception if it raised one."""
        with WaitScope("the transfers of a failed schedule"):
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._act()
        except Exception as error:
            self._error = error
