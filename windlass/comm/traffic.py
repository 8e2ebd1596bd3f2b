"""Counts what the collectives carry: payload elements by law, bytes by what was really moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

_observer: Callable[[str, int], None] | None = None


def set_traffic_observer(observer: Callable[[str, int], None] | None) -> None:
    """From now on `observer` is told of every collective of every engine of this process: its operation and the bytes
    that this rank read from others. None: nobody is."""
    global _observer
    _observer = observer


@dataclass
class Traffic:
    """Totals since `reset`. An all-reduce is a reduction and a gather, so it counts twice; padding is left out."""

    payload: Counter[str] = field(default_factory=Counter)  # elements of parameters, by operation
    bytes_moved: Counter[str] = field(default_factory=Counter)  # bytes this rank read from others, by operation
    control: int = 0  # elements of the small control reductions

    def add(self, operation: str, elements: int, moved: int) -> None:
        self.payload[operation] += elements
        self.bytes_moved[operation] += moved
        if _observer is not None:
            _observer(operation, moved)

    def reset(self) -> None:
        self.payload.clear()
        self.bytes_moved.clear()
        self.control = 0
