"""Work that was started and may not be finished: a gather, a reduction, a transfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Pending(Protocol):
    """Something started. `poll` finishes it if that needs no waiting; `wait` finishes it whatever it takes."""

    def poll(self) -> bool:
        """Finish if possible without blocking; True once finished."""
        ...

    def wait(self) -> None:
        """Block until finished. Waiting again does nothing."""
        ...


class CompletedPending:
    """Pending work that was finished when it was made."""

    def poll(self) -> bool:
        return True

    def wait(self) -> None:
        return


DONE = CompletedPending()


class FinishingPending:
    """Pending work in two halves: a condition that others fulfil, then something to do here, once.

    Args:
        ready: True when `finish` may run without blocking; None where that can't be asked.
        block: waits until `ready`.
        finish: runs once after that.
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
            self._finished = True  # before `finish`: what fails must not run a second time and add twice
            self._finish()


class AllPending:
    """Finished once all parts are."""

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
    """Pending work after other pending work: `start` runs once the first is finished, and its result is waited for.

    Args:
        first: what must be finished before.
        start: starts the rest.
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
        """Block until the first is finished and the rest has started."""
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
