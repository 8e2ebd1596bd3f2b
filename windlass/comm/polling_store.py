"""Store that polls for keys over another store's connection, so that a wait does not block other threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

_PAUSE = 0.005


class PollingStore(Store):
    """View of a store that polls for keys: other threads can use the store while a process group is constructed.

    `TCPStore.wait` occupies the store's connection until the key is written. A second connection would avoid this, but
    can take seconds to open: torch looks up the host name of the address, and on some machines no name server answers.

    Args:
        store: store whose operations can be called from several threads.
        timeout: longest wait for a key.
        is_over: returns True if the key will never be written, for example because the process that would write it
            was replaced by another one.
    """

    def __init__(self, store: Any, timeout: timedelta, is_over: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._store, self._longest, self._is_over = store, timeout, is_over

    def set(self, key: str, value: Any) -> None:
        """Write a value, in hexadecimal, because `TCPStore.set` takes text only."""
        self._store.set(key, (value.encode() if isinstance(value, str) else bytes(value)).hex())

    def get(self, key: str) -> bytes:
        """Return a value, after waiting for its key. Raises the errors of `wait`."""
        self.wait([key])
        return bytes.fromhex(self._store.get(key).decode())

    def add(self, key: str, value: int) -> int:
        """Add to a counter, and return its new value."""
        return int(self._store.add(key, value))

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys exist."""
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for all keys.

        Raises:
            RuntimeError: a key is not written in time (torch's stores raise the same type), or `is_over` returned True.
        """
        limit = self._longest if timeout is None else timeout
        until = time.monotonic() + limit.total_seconds()
        while not self._store.check(keys):
            if time.monotonic() > until:
                raise RuntimeError(f"wait timeout after {limit.total_seconds():.0f} s, keys: {', '.join(keys)}")
            if self._is_over():
                raise RuntimeError(f"no process writes the keys {', '.join(keys)} any more")
            time.sleep(_PAUSE)
