"""Where in the core this process waits for other ranks, for whoever looks from outside."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType


class Activity:
    """Of this process; written by the core, read by the watchdog's thread.

    Attributes:
        now: the innermost wait, or None.
        last: the latest wait that began.
        broken: the latest error that left a wait, and that wait.
        under_way: the oldest collective that runs apart from the host (NCCL), its wait, and what tells its end.
        evaluating: the last forward was one in evaluation mode.
    """

    def __init__(self) -> None:
        self.now: During | None = None
        self.last: During | None = None
        self.broken: tuple[BaseException, During] | None = None
        self.under_way: tuple[object, During | None] | None = None
        self.evaluating = False
        self.moved = (
            0  # counts what travelled within waits, so that a long one which gets on is known from one that hangs
        )
        self.watched = False  # somebody looks, and clears `under_way` when that ended

    def started(self, work: object) -> None:
        """A collective was started that the host will not wait for; the oldest that is not finished counts."""
        if self.watched and self.under_way is None:
            self.under_way = work, self.now


activity = Activity()


class During:
    """`with During("gather", names):` says what the core waits for inside. Two attribute writes on the way in, one out.

    Args:
        operation: in the words of the vocabulary.
        names: of the parameters, if it is about some.
    """

    __slots__ = ("_before", "names", "operation", "thread")

    def __init__(self, operation: str, names: Sequence[str] = ()) -> None:
        self.operation, self.names = operation, names

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        self._before = activity.now
        activity.now = activity.last = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        activity.now = self._before
        if error is not None and (activity.broken is None or activity.broken[0] is not error):
            activity.broken = error, self
