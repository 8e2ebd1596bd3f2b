"""Named ranges of time of this process, for a profile. Without a recorder no object is made: a range costs one test."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol


class RangeRecorder(Protocol):
    """Receiver of ranges, of operations in flight, and of changes of memory."""

    def begin(self, kind: str, name: str, detail: str = "") -> int:
        """Begin a range on this thread. Return a token for `end`."""
        ...

    def end(self, token: int) -> None:
        """End the range of this token, and all ranges that began inside it and have not ended."""
        ...

    def begin_flight(self, key: object, kind: str, name: str) -> None:
        """Record the start of an operation that runs concurrently until `end_flight` is called with the same key."""
        ...

    def end_flight(self, key: object) -> None:
        """Record the end of an operation in flight; ignored if its start was not recorded."""
        ...

    def set_held_bytes(self, holder: str, nbytes: int) -> None:
        """Record that `holder` has `nbytes` of device memory from now on."""
        ...


recorder: RangeRecorder | None = None  # read at each range; None: nothing is recorded

_NOTHING = nullcontext()


def traced(kind: str, name: str = "") -> AbstractContextManager[None]:
    """Return a context that records its time as a range; without a recorder, a context that does nothing.

    Args:
        kind: `forward`, `backward`, `step`, `update`, `fetch`, `store`, `send`, `disk`, ...
        name: a string that exists already. Composing one for this call would cost time even without a recorder.
    """
    return _NOTHING if recorder is None else _TracedRange(recorder, kind, name)


def install_recorder(new: RangeRecorder | None) -> RangeRecorder | None:
    """Send ranges to `new` from now on; None: record nothing. Return the previous recorder."""
    global recorder
    before, recorder = recorder, new
    return before


class _TracedRange:
    __slots__ = ("_kind", "_name", "_recorder", "_token")

    def __init__(self, receiver: RangeRecorder, kind: str, name: str) -> None:
        self._recorder, self._kind, self._name, self._token = receiver, kind, name, -1

    def __enter__(self) -> None:
        self._token = self._recorder.begin(self._kind, self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.end(self._token)
