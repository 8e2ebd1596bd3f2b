"""Where in the core this process waits for other ranks, for whoever looks from outside."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType


class CollectiveActivity:
    """Of this process; written by the core, read by the watchdog's thread.

    Attributes:
        last: the latest wait that began, in any thread.
        broken: the latest error that left a wait, by its id (whoever kept it would keep what its frames hold, too), and
            that wait.
        under_way: the oldest collective that runs apart from the host (NCCL), its wait, and what tells its end.
        left: what raised in a call that ranks make together, and was caught; empty once they go on together.
        evaluating: the last forward was one in evaluation mode.
    """

    def __init__(self) -> None:
        self._wait_of_thread: dict[int, WaitScope] = {}  # by thread
        self.last_wait: WaitScope | None = None
        self.failed_wait: tuple[int, WaitScope] | None = None
        self.pending_collective: tuple[object, WaitScope | None] | None = None
        self.caught_error = ""
        self.is_evaluating = False
        self.progress_count = (
            0  # counts what travelled within waits, so that a long one which gets on is known from one that hangs
        )
        self.is_watched = False  # somebody looks, and clears `under_way` when that ended

    @property
    def current_wait(self) -> WaitScope | None:
        """The innermost wait of the thread that asks, or None."""
        return self._wait_of_thread.get(threading.get_ident())

    def wait_of(self, thread: int) -> WaitScope | None:
        """The innermost wait of another thread, or None."""
        return self._wait_of_thread.get(thread)

    def enter_wait(self, entered: WaitScope) -> WaitScope | None:
        """A wait of this thread begins; returns the one around it."""
        thread = threading.get_ident()
        around = self._wait_of_thread.get(thread)
        self._wait_of_thread[thread] = self.last_wait = entered
        return around

    def leave_wait(self, outer_wait: WaitScope | None) -> None:
        """The innermost wait of this thread is over."""
        if outer_wait is None:
            self._wait_of_thread.pop(threading.get_ident(), None)
        else:
            self._wait_of_thread[threading.get_ident()] = outer_wait

    def collective_started(self, work: object) -> None:
        """A collective was started that the host will not wait for; the oldest that is not finished counts."""
        if self.is_watched and self.pending_collective is None:
            self.pending_collective = work, self.current_wait


activity = CollectiveActivity()


class WaitScope:
    """`with During("gather", names):` says what the core waits for inside. A dictionary's write on the way in, one out.

    Args:
        operation: in the words of the vocabulary.
        names: of the parameters, if it is about some.

    Attributes:
        around: the mark that this one lies in.
    """

    __slots__ = ("operation", "outer", "parameter_names")

    def __init__(self, operation: str, parameter_names: Sequence[str] = ()) -> None:
        self.operation, self.parameter_names = operation, parameter_names
        self.outer: WaitScope | None = None

    def __enter__(self) -> None:
        self.outer = activity.enter_wait(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        activity.leave_wait(self.outer)
        if error is not None and (activity.failed_wait is None or activity.failed_wait[0] != id(error)):
            activity.failed_wait = id(error), self
