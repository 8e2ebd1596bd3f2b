"""Discrete-event simulation of tasks on streams that share links, on simpy.

[Note: shared links] A task waits for its predecessors and for its streams, takes its fixed time, and then transfers its
loads on all its links at the same pace. Each link divides its rate equally among the tasks that use it. The part of a
share that a task cannot use, because another of its links is slower, goes to the other tasks (max-min fairness).
Streams run their tasks in the order in which they were added, as CUDA streams and a rank's Python thread do.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from windlass.base.errors import ConfigError

Stream = tuple[str, str]  # process (a rank), and name of its stream
LinkKey = tuple[str, str]  # process that the link belongs to, and kind of the link


@dataclass(eq=False)
class SimulatedTask:
    """Computation or transfer.

    Attributes:
        name: Label in the timeline.
        kind: `compute`, or the cause of the wait: an axis, `pipeline`, `host`, `disk`.
        streams: Streams that the task occupies from begin to end.
        seconds: Fixed time: computation, or latency.
        loads: Bytes to transfer on links, after the fixed time.
        after: Tasks that must end before this one begins.
        nbytes: Bytes that a rank receives, for the timeline.
        begin, end: Simulated times in seconds; -1: not yet.
        missing: Number of tasks of `after` that have not ended.
        followers: Tasks that have this one in `after`.
    """

    name: str
    kind: str
    streams: tuple[Stream, ...]
    seconds: float = 0.0
    loads: dict[LinkKey, float] = field(default_factory=dict)
    after: list[SimulatedTask] = field(default_factory=list)
    nbytes: int = 0
    begin: float = -1.0
    end: float = -1.0
    missing: int = 0
    followers: list[SimulatedTask] = field(default_factory=list)


@dataclass(eq=False)
class _Transfer:
    task: SimulatedTask
    left: float = 1.0  # fraction of the task's loads that remains to be transferred
    speed: float = 0.0  # fraction of the loads transferred per second


class EventLoop:
    """Simulation of a set of tasks.

    Args:
        rates: Bytes a second of each link.

    Raises:
        ConfigError: simpy is not installed.
    """

    def __init__(self, rates: dict[LinkKey, float]) -> None:
        try:
            import simpy
        except ImportError:
            raise ConfigError("the simulator needs simpy: pip install 'windlass[simulate]'") from None
        self._environment: Any = simpy.Environment()
        self._rates = rates
        self.tasks: list[SimulatedTask] = []
        self._queues: dict[Stream, deque[SimulatedTask]] = defaultdict(deque)
        self._transfers: dict[int, _Transfer] = {}
        self._updated = 0.0
        self._version = 0
        self._stale = False
        self.link_bytes: dict[LinkKey, float] = defaultdict(float)
        self.link_busy: dict[LinkKey, float] = defaultdict(float)

    def add(self, task: SimulatedTask) -> SimulatedTask:
        """Append a task to its streams, and return the task."""
        self.tasks.append(task)
        for stream in task.streams:
            self._queues[stream].append(task)
        task.missing = len(task.after)
        for before in task.after:
            before.followers.append(task)
        return task

    def run(self) -> float:
        """Run all tasks and return the time at which the last one ends.

        Raises:
            ConfigError: tasks wait for each other.
        """
        for task in self.tasks:
            self._begin_if_ready(task)
        self._environment.run()
        waiting = [task for task in self.tasks if task.end < 0]
        if waiting:
            raise ConfigError(
                f"{len(waiting)} tasks of the simulated step wait for each other, the first is {waiting[0].name!r}; "
                "report this bug with the configuration and the cluster"
            )
        return max((task.end for task in self.tasks), default=0.0)

    def _begin_if_ready(self, task: SimulatedTask) -> None:
        if task.begin >= 0 or task.missing:
            return
        if any(self._queues[stream][0] is not task for stream in task.streams):
            return
        task.begin = self._environment.now
        if task.seconds > 0:
            self._environment.timeout(task.seconds).callbacks.append(lambda _: self._transfer(task))
        else:
            self._transfer(task)

    def _transfer(self, task: SimulatedTask) -> None:
        if not any(task.loads.values()):
            # Even a task without duration ends in a separate event, so that chains of such tasks do not recurse.
            self._environment.timeout(0).callbacks.append(lambda _: self._finish(task))
            return
        self._advance()
        for link, nbytes in task.loads.items():
            self.link_bytes[link] += nbytes
        self._transfers[id(task)] = _Transfer(task)
        self._reschedule()

    def _finish(self, task: SimulatedTask) -> None:
        task.end = self._environment.now
        freed = []
        for stream in task.streams:
            queue = self._queues[stream]
            queue.popleft()
            if queue:
                freed.append(queue[0])
        for follower in task.followers:
            follower.missing -= 1
        for other in [*task.followers, *freed]:
            self._begin_if_ready(other)

    def _advance(self) -> None:
        """Advance all transfers to the current time."""
        now = self._environment.now
        passed = now - self._updated
        if passed > 0:
            busy = set[LinkKey]()
            for one in self._transfers.values():
                one.left -= one.speed * passed
                busy.update(link for link, nbytes in one.task.loads.items() if nbytes)
            for link in busy:
                self.link_busy[link] += passed
        self._updated = now

    def _reschedule(self) -> None:
        """Schedule one event that computes all speeds anew, after all changes of this moment."""
        if not self._stale:
            self._stale = True
            self._environment.timeout(0).callbacks.append(lambda _: self._share())

    def _share(self) -> None:
        self._stale = False
        self._advance()
        share_links(list(self._transfers.values()), self._rates)
        self._version += 1
        if not self._transfers:
            return
        version = self._version
        waits = {key: max(0.0, one.left) / one.speed for key, one in self._transfers.items()}
        wait = min(waits.values())
        due = [key for key, other in waits.items() if other <= wait * (1 + 1e-9)]
        self._environment.timeout(wait).callbacks.append(lambda _: self._arrive(version, due))

    def _arrive(self, version: int, due: list[int]) -> None:
        if version != self._version:
            return  # speeds have changed since this event was scheduled
        self._advance()
        done = [self._transfers[key] for key in due]
        for one in done:
            del self._transfers[id(one.task)]
        self._reschedule()
        for one in done:
            self._finish(one.task)


def share_links(transfers: list[_Transfer], rates: dict[LinkKey, float]) -> None:
    """Set the speed of each transfer by max-min fairness.

    Each transfer on a link gets an equal part of the link's rate. If all transfers on a link use their part completely,
    their speeds are settled, and the remaining rates of other links are divided anew among the unsettled transfers.
    """
    if len(transfers) == 1:  # nothing to share
        only = transfers[0]
        only.speed = min(rates[link] / nbytes for link, nbytes in only.task.loads.items() if nbytes)
        return
    unsettled = list(transfers)
    free = {link: rates[link] for one in transfers for link, n in one.task.loads.items() if n}
    while unsettled:
        users: dict[LinkKey, list[_Transfer]] = defaultdict(list)
        for one in unsettled:
            for link, nbytes in one.task.loads.items():
                if nbytes:
                    users[link].append(one)
        parts = {link: free[link] / len(ones) for link, ones in users.items()}
        for one in unsettled:
            one.speed = min(parts[link] / nbytes for link, nbytes in one.task.loads.items() if nbytes)
        full = {
            link
            for link, ones in users.items()
            if all(one.speed * one.task.loads[link] >= parts[link] * (1 - 1e-12) for one in ones)
        }
        settled = [one for one in unsettled if any(link in full for link, nbytes in one.task.loads.items() if nbytes)]
        if not settled:  # no link is full: transfers limit one another on different links; settle the slowest
            settled = [min(unsettled, key=lambda one: one.speed)]
        for one in settled:
            for link, nbytes in one.task.loads.items():
                if nbytes:
                    free[link] = max(0.0, free[link] - one.speed * nbytes)
        gone = {id(one) for one in settled}
        unsettled = [one for one in unsettled if id(one) not in gone]
