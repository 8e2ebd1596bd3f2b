"""Log of the ranges of one rank, and the division of its time into its own work and waits for each resource.

[Note: division of time] Each moment of the engine's thread belongs to its innermost range that waits for something:
other ranks, a disk, or a copy between host and device. Time outside such ranges is the rank's own. The part of it that
the process spent on processor cores (CPU time of all threads, at most the elapsed time) is compute. The rest is idle:
the process slept, or other processes used its cores. Hooks of a backward on a GPU run on a thread of autograd while the
engine's thread waits for the backward, so their time counts as the engine's thread's.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

from windlass.base.backward_callbacks import current_backward_id

DISK, HOST_COPIES = "disk", "copies between host and device"
LOCAL_WAITS = frozenset({DISK, HOST_COPIES})
"""Resources of waits that do not depend on another rank."""


@dataclass(frozen=True)
class LoggedRange:
    """One range; times in ns of the monotonic clock."""

    thread: int
    kind: str
    name: str
    detail: str
    start: int
    end: int


@dataclass(frozen=True)
class LoggedFlight:
    """Operation that ran asynchronously: an all-gather or a reduction, from its start to its end."""

    kind: str
    name: str
    start: int
    end: int


@dataclass
class TimeDivision:
    """Time of the engine's thread in one step, in ns, see [Note: division of time].

    Attributes:
        start, end: times of the monotonic clock.
        compute, idle: the two parts of the time in which the thread does not wait.
        waits: time of the waits for each resource.
        phases: time of forward, backward, step and update, waits included.
    """

    start: int
    end: int = 0
    compute: int = 0
    idle: int = 0
    waits: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    phases: dict[str, int] = field(default_factory=lambda: defaultdict(int))


@dataclass(frozen=True)
class _OpenRange:
    kind: str
    name: str
    detail: str
    start: int
    wire: str  # the resource that the range waits for; empty: none


PHASES = frozenset({"forward", "backward", "step", "update"})


class RangeLog:
    """Recorder of ranges (`trace_ranges.RangeRecorder`). The first step begins at its construction.

    Args:
        transport: name of the transport of all-gathers and reductions.

    Attributes:
        ranges, flights: finished ranges and operations, in the order of their ends.
        held_bytes: for each change of device memory: the time, the name of the holder, and the bytes that it then
            holds.
        steps: division of the time of each finished step.
    """

    def __init__(self, transport: str) -> None:
        self._transport, self._main = transport, threading.get_ident()
        self._open: dict[int, list[_OpenRange]] = defaultdict(list)
        self._open_flights: dict[object, tuple[str, str, int]] = {}
        self.ranges: list[LoggedRange] = []
        self.flights: list[LoggedFlight] = []
        self.held_bytes: list[tuple[int, str, int]] = []
        self.steps: list[TimeDivision] = []
        self.main_thread = self._main
        self._last, self._last_cpu = time.perf_counter_ns(), time.process_time_ns()
        self._current = TimeDivision(self._last)

    def begin(self, kind: str, name: str, detail: str = "") -> int:
        thread, now = self._thread(), time.perf_counter_ns()
        stack = self._open[thread]
        if thread == self._main:
            self._divide(now)
        wire = wire_of(kind, name, self._transport) or (stack[-1].wire if stack else "")
        stack.append(_OpenRange(kind, name, detail, now, wire))
        return len(stack) - 1

    def end(self, token: int) -> None:
        thread, now = self._thread(), time.perf_counter_ns()
        stack = self._open[thread]
        if token >= len(stack):
            return  # the range began before this log, or ended together with an outer range
        if thread == self._main:
            self._divide(now)
        while len(stack) > token:
            one = stack.pop()
            self.ranges.append(LoggedRange(thread, one.kind, one.name, one.detail, one.start, now))
            if thread == self._main and one.kind in PHASES and all(outer.kind != one.kind for outer in stack):
                self._current.phases[one.kind] += now - max(one.start, self._current.start)

    def begin_flight(self, key: object, kind: str, name: str) -> None:
        self._open_flights[key] = kind, name, time.perf_counter_ns()

    def end_flight(self, key: object) -> None:
        begun = self._open_flights.pop(key, None)
        if begun is not None:
            self.flights.append(LoggedFlight(*begun, time.perf_counter_ns()))

    def set_held_bytes(self, holder: str, nbytes: int) -> None:
        self.held_bytes.append((time.perf_counter_ns(), holder, nbytes))

    def end_step(self) -> None:
        """End the current step here, and begin the next."""
        now = time.perf_counter_ns()
        self._divide(now)
        self._current.end = now
        self.steps.append(self._current)
        self._current = TimeDivision(now)

    def _thread(self) -> int:
        thread = threading.get_ident()
        return self._main if thread != self._main and current_backward_id() >= 0 else thread

    def _divide(self, now: int) -> None:
        """Add the time since the last call to the division of the current step."""
        cpu = time.process_time_ns()
        elapsed, busy = now - self._last, cpu - self._last_cpu
        self._last, self._last_cpu = now, cpu
        stack = self._open[self._main]
        if stack and stack[-1].wire:
            self._current.waits[stack[-1].wire] += elapsed
            return
        self._current.compute += min(elapsed, busy)
        self._current.idle += elapsed - min(elapsed, busy)


def wire_of(kind: str, name: str, transport: str) -> str:
    """Return the name of the resource that a range waits for; empty if it waits for nothing.

    Args:
        kind: kind of the range.
        name: name of the range; for the kind `wait`, the operation of a `WaitScope`.
        transport: name of the transport of all-gathers and reductions.
    """
    if kind == "disk":
        return DISK
    if kind in ("fetch", "store"):
        return HOST_COPIES
    if kind != "wait":
        return ""
    of_transport = {"gather": "all-gather", "reduce": "reduction", "broadcast": "broadcast"}
    if name in of_transport:
        return f"{of_transport[name]} over {transport}"
    if name.startswith(("agreed order", "agreement", "the comparison")):
        return "agreement of the ranks"
    for start, what in (
        ("a collective along ", "collectives"),
        ("a pass along ", "ring"),
        ("a transfer along ", "sends"),
    ):
        if name.startswith(start):
            return f"{what} along {name.removeprefix(start)}"
    return name
