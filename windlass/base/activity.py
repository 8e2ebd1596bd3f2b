"""Where in the core this process waits for other ranks, for whoever looks from outside."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType


class Activity:
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
        self._waits: dict[int, During] = {}  # by thread
        self.last: During | None = None
        self.broken: tuple[int, During] | None = None
        self.under_way: tuple[object, During | None] | None = None
        self.left = ""
        self.evaluating = False
        self.moved = (
            0  # counts what travelled within waits, so that a long one which gets on is known from one that hangs
        )
        self.watched = False  # somebody looks, and clears `under_way` when that ended

    @property
    def now(self) -> During | None:
        """The innermost wait of the thread that asks, or None."""
        return self._waits.get(threading.get_ident())

    def of(self, thread: int) -> During | None:
        """The innermost wait of another thread, or None."""
        return self._waits.get(thread)

    def enter(self, wait: During) -> During | None:
        """A wait of this thread begins; returns the one around it."""
        thread = threading.get_ident()
        around = self._waits.get(thread)
        self._waits[thread] = self.last = wait
        return around

    def leave(self, around: During | None) -> None:
        """The innermost wait of this thread is over."""
        if around is None:
            self._waits.pop(threading.get_ident(), None)
        else:
            self._waits[threading.get_ident()] = around

    def started(self, work: object) -> None:
        """A collective was started that the host will not wait for; the oldest that is not finished counts."""
        if self.watched and self.under_way is None:
            self.under_way = work, self.now


activity = Activity()


class During:
    """`with During("gather", names):` says what the core waits for inside. A dictionary's write on the way in, one out.

    Args:
        operation: in the words of the vocabulary.
        names: of the parameters, if it is about some.

    Attributes:
        around: the mark that this one lies in.
    """

    __slots__ = ("around", "names", "operation")

    def __init__(self, operation: str, names: Sequence[str] = ()) -> None:
        self.operation, self.names = operation, names
        self.around: During | None = None

    def __enter__(self) -> None:
        self.around = activity.enter(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        activity.leave(self.around)
        if error is not None and (activity.broken is None or activity.broken[0] != id(error)):
            activity.broken = id(error), self
