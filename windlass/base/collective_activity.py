"""Record of the waits for other ranks in this process, for the watchdog."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType

from windlass.base import trace_ranges


class CollectiveActivity:
    """Waits and collectives of this process, read by the watchdog's thread.

    Attributes:
        last_wait: wait that began last, in any thread.
        failed_wait: id of the latest error that ended a wait, and the innermost wait that it ended. Only the id is
            stored, because the error would keep its frames alive.
        pending_collective: oldest unfinished collective that runs asynchronously to the host (NCCL), with the wait
            in which it was started.
        caught_error: error in a collective call that the script caught; empty once the ranks continue together.
        is_evaluating: True if the last forward was in evaluation mode.
    """

    def __init__(self) -> None:
        self._wait_of_thread: dict[int, WaitScope] = {}  # innermost wait of each thread, by thread id
        self.last_wait: WaitScope | None = None
        self.failed_wait: tuple[int, WaitScope] | None = None
        self.pending_collective: tuple[object, WaitScope | None] | None = None
        self.caught_error = ""
        self.is_evaluating = False
        self.progress_count = 0  # counts transfers inside waits, to distinguish a long wait with progress from a hang
        self.is_watched = False  # True: a watchdog runs, and clears `pending_collective` when the collective has ended

    @property
    def current_wait(self) -> WaitScope | None:
        """Innermost wait of the calling thread, or None."""
        return self._wait_of_thread.get(threading.get_ident())

    def wait_of(self, thread: int) -> WaitScope | None:
        """Return the innermost wait of another thread, or None."""
        return self._wait_of_thread.get(thread)

    def enter_wait(self, entered: WaitScope) -> WaitScope | None:
        """Record the start of a wait of this thread. Return the wait that surrounds it, or None."""
        thread = threading.get_ident()
        around = self._wait_of_thread.get(thread)
        self._wait_of_thread[thread] = self.last_wait = entered
        return around

    def leave_wait(self, outer_wait: WaitScope | None) -> None:
        """Record the end of this thread's innermost wait; `outer_wait` is the result of `enter_wait` for it."""
        if outer_wait is None:
            self._wait_of_thread.pop(threading.get_ident(), None)
        else:
            self._wait_of_thread[threading.get_ident()] = outer_wait

    def collective_started(self, work: object) -> None:
        """Record a collective that the host does not wait for, if a watchdog runs and no older one is recorded."""
        if self.is_watched and self.pending_collective is None:
            self.pending_collective = work, self.current_wait


activity = CollectiveActivity()


class WaitScope:
    """Context manager of a wait for other ranks: `with WaitScope("gather", names):`. It costs two dictionary writes.

    Args:
        operation: name of the operation, in terms of the glossary.
        parameter_names: parameters of the operation, if any.

    Attributes:
        outer: the wait that surrounds this one, or None.
    """

    __slots__ = ("_token", "operation", "outer", "parameter_names")

    def __init__(self, operation: str, parameter_names: Sequence[str] = ()) -> None:
        self.operation, self.parameter_names = operation, parameter_names
        self.outer: WaitScope | None = None
        self._token: int | None = None  # token of this wait's range in the profile's recorder

    def __enter__(self) -> None:
        self.outer = activity.enter_wait(self)
        if (recorder := trace_ranges.recorder) is not None:
            names = self.parameter_names
            self._token = recorder.begin("wait", self.operation, names[0] if names else "")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        activity.leave_wait(self.outer)
        if self._token is not None and trace_ranges.recorder is not None:
            trace_ranges.recorder.end(self._token)
        if error is not None and (activity.failed_wait is None or activity.failed_wait[0] != id(error)):
            activity.failed_wait = id(error), self
