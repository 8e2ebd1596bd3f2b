"""Traffic counters: payload elements and received bytes, by operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

_observer: Callable[[str, int], None] | None = None


def set_traffic_observer(observer: Callable[[str, int], None] | None) -> None:
    """Call `observer` whenever a `Traffic` of this process counts an operation (`add`); None removes the observer.

    The observer's arguments are the operation and the number of bytes that this rank received from others.
    """
    global _observer
    _observer = observer


@dataclass
class Traffic:
    """Totals since `reset`. In `payload`, an all-reduce counts as a reduction and a gather, and padding is left out."""

    payload: Counter[str] = field(default_factory=Counter)  # elements of parameters or their gradients, by operation
    bytes_moved: Counter[str] = field(default_factory=Counter)  # bytes that this rank received, with padding
    # part of `bytes_moved` that came from other nodes; counted only for transports that send messages
    across_nodes: Counter[str] = field(default_factory=Counter)
    control: int = 0  # elements of the small control reductions

    def add(self, operation: str, elements: int, moved: int, across: int = 0) -> None:
        self.payload[operation] += elements
        self.bytes_moved[operation] += moved
        if across:
            self.across_nodes[operation] += across
        if _observer is not None:
            _observer(operation, moved)

    def reset(self) -> None:
        self.payload.clear()
        self.bytes_moved.clear()
        self.across_nodes.clear()
        self.control = 0
