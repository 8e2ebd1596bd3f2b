"""Pending work: an operation that was started and may be unfinished, e.g. an all-gather, a reduction or a transfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Pending(Protocol):
    """Started operation. `poll` finishes it if that does not block; `wait` blocks until it is finished."""

    def poll(self) -> bool:
        """Finish the operation if possible without blocking. Return True once it is finished."""
        ...

    def wait(self) -> None:
        """Block until the operation is finished. Waiting again does nothing."""
        ...


class CompletedPending:
    """Pending work that is finished from the start."""

    def poll(self) -> bool:
        return True

    def wait(self) -> None:
        return


DONE = CompletedPending()


class FinishingPending:
    """Pending work in two parts: an external condition, then a local function that runs once.

    Args:
        ready: function that returns True if the condition holds, so that `finish` may run; None: it can't be queried.
        block: waits for the condition.
        finish: runs once, after the condition holds.
    """

    def __init__(self, ready: Callable[[], bool] | None, block: Callable[[], None], finish: Callable[[], None]) -> None:
        self._ready, self._block, self._finish = ready, block, finish
        self._finished = False

    def poll(self) -> bool:
        if not self._finished and self._ready is not None and self._ready():
            self.wait()
        return self._finished

    def wait(self) -> None:
        if not self._finished:
            self._block()
            self._finished = True  # before `finish`: a failing finish must not run again and accumulate twice
            self._finish()


class AllPending:
    """Pending work that is finished once all its parts are."""

    def __init__(self, parts: list[Pending]) -> None:
        self._unfinished = parts

    def poll(self) -> bool:
        self._unfinished = [part for part in self._unfinished if not part.poll()]
        return not self._unfinished

    def wait(self) -> None:
        for part in self._unfinished:
            part.wait()
        self._unfinished = []


class ChainedPending:
    """Pending work in sequence: `start` runs once `first` is finished, and the work that it returns must finish too.

    Args:
        first: work that must finish first.
        start: starts the second part.
    """

    def __init__(self, first: Pending, start: Callable[[], Pending]) -> None:
        self._current: Pending = first
        self._start_next: Callable[[], Pending] | None = start

    def poll(self) -> bool:
        if not self._current.poll():
            return False
        if self._start_next is not None:
            self._start_second()
        return self._current.poll()

    def wait_for_first(self) -> None:
        """Block until `first` is finished and the second part has started."""
        if self._start_next is not None:
            self._current.wait()
            self._start_second()

    def wait(self) -> None:
        self.wait_for_first()
        self._current.wait()

    def _start_second(self) -> None:
        start, self._start_next = self._start_next, None
        assert start is not None
        self._current = start()
