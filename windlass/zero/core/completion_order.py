"""Completion order: collectives in flight finish in the order in which they started."""

from __future__ import annotations

from collections import deque

from windlass.base.pending import Pending


class CompletionOrder:
    """Queue of a model's collectives in flight. Before it waits for a collective, a rank finishes all earlier ones.

    See "Completion order" in [Note: agreed order].

    Attributes:
        is_active: False for a single rank, whose collectives finish in any order.
    """

    def __init__(self) -> None:
        self.is_active = False
        self._in_flight: deque[OrderedPending] = deque()

    def enqueue(self, pending: Pending) -> Pending:
        """Wrap a collective that was just started, so that it finishes after all earlier ones."""
        if not self.is_active:
            return pending
        one = OrderedPending(self, pending)
        self._in_flight.append(one)
        return one

    def finish_all(self) -> None:
        """Finish all collectives in flight."""
        while self._in_flight:
            self._finish_first()

    def finish_to(self, one: OrderedPending) -> None:
        """Finish all collectives started up to and including `one`."""
        while not one.done and self._in_flight:
            self._finish_first()

    def poll_to(self, one: OrderedPending) -> None:
        """Mark as done the collectives up to and including `one` that have completed, without waiting."""
        while not one.done and self._in_flight and self._in_flight[0].inner.poll():
            self._in_flight.popleft().done = True

    def _finish_first(self) -> None:
        first = self._in_flight.popleft()
        # Set `done` before the wait: `first` has left the queue even if `wait` raises.
        first.done = True
        first.inner.wait()


class OrderedPending:
    """Collective in flight that finishes after all earlier ones."""

    def __init__(self, order: CompletionOrder, inner: Pending) -> None:
        self._order, self.inner, self.done = order, inner, False

    def poll(self) -> bool:
        self._order.poll_to(self)
        return self.done

    def wait(self) -> None:
        self._order.finish_to(self)
