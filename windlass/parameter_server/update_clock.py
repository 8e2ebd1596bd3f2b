"""Order of the pushes and pulls of one server: which gradients make an update, and which pulls must wait. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from windlass.parameter_server.settings import ParameterServerSettings


class PushResult(Enum):
    """Result of a push."""

    WAITS = 0  # the gradients of other workers are missing
    COMPLETES = 1  # an update can be made now
    DROPPED = 2  # the synchronous update of its step was made without the gradient
    TOO_OLD = 3  # more than `max_age` updates were made since the worker's pull
    COUNTED = 4  # the gradient is in an update already: the worker sent it again to a process that took over
    EXTRA = 5  # dropped: an earlier gradient of the worker waits for the same synchronous update


@dataclass
class UpdateClock:
    """Versions of a server's parameters, and the steps of its workers.

    Attributes:
        workers: number of workers at the start.
        version: number of updates so far.
        steps: number of pushes of each connected or absent worker, not counted in synchronous mode.
        waiting: for each worker, the number of its push that waits for the next update.
        counted: for each worker, the number of its last push that is in an update.
        retired: workers that have left by `close`: synchronous updates no longer need them.
        absent: workers that have not connected with this process yet.
    """

    settings: ParameterServerSettings
    workers: int
    version: int = 0
    steps: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    counted: dict[int, int] = field(default_factory=dict)
    retired: set[int] = field(default_factory=set)
    absent: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.absent = set(range(self.workers))

    @property
    def needed(self) -> int:
        """Number of gradients that the next synchronous update needs."""
        return max(1, self.workers - len(self.retired - self.waiting.keys()) - self.settings.backup_workers)

    @property
    def is_complete(self) -> bool:
        """True if a synchronous update can be made now."""
        return self.settings.mode == "synchronous" and len(self.waiting) >= self.needed

    def begin(self) -> None:
        """Begin a run with 0 steps for each worker, so that in bounded mode no worker gets far ahead of absent ones."""
        self.counted, self.steps = {}, dict.fromkeys(self.absent, 0)

    def take_over(self, everyone: Collection[int], retired: Collection[int]) -> None:
        """Continue in place of a process that was lost. Its workers, which connect again, are absent until then.

        Args:
            everyone: all workers that began the run or joined it.
            retired: the workers that have left by `close`.
        """
        self.retired = set(retired)
        self.absent = (set(everyone) | self.steps.keys()) - self.retired
        least = min((step for worker, step in self.steps.items() if worker in self.absent), default=0)
        # a worker that joined after the snapshot has made at least as many steps as the slowest
        self.steps = {worker: self.steps.get(worker, least) for worker in self.absent}

    def join(self, worker: int, pulled: int, step: int) -> None:
        """Add a worker.

        In synchronous mode, a restored server with an older version than its workers continues at their version.

        Args:
            pulled: version of the worker's last pull.
            step: number of the worker's pushes to this server, as `steps` counts them; -1: the worker is new.
        """
        if self.settings.mode == "synchronous" and pulled > self.version:
            self.version = pulled
            # With backup workers, keep the gradients that wait here. A worker that sent one may wait at another server
            # for the joining worker, and the joining worker waits here for the next update.
            if not self.settings.backup_workers:
                self.waiting.clear()
        self.absent.discard(worker)
        # a new worker starts at the smallest count, so that no other worker has to wait for it
        self.steps[worker] = step if step >= 0 else min(self.steps.values(), default=0)

    def leave(self, worker: int, *, retires: bool) -> None:
        """Remove a worker: pulls of the others no longer wait for it. A gradient that it has pushed still counts.

        Args:
            retires: True if the worker has left by `close`. Otherwise it was lost, and synchronous updates still need
                its gradients.
        """
        self.steps.pop(worker, None)
        self.absent.discard(worker)
        if retires:
            self.retired.add(worker)

    def push(self, worker: int, pulled: int, number: int) -> PushResult:
        """Register a gradient that belongs to version `pulled` of the parameters.

        Args:
            number: number of this push, larger than those of the worker's earlier pushes, also of an earlier process
                with the number of the worker.
        """
        if number <= self.counted.get(worker, 0):
            self.steps[worker] = self.steps.get(worker, 0) + 1
            return PushResult.COUNTED
        if self.settings.mode == "synchronous":
            if self.waiting.get(worker) == number:
                return PushResult.WAITS
            if pulled < self.version:
                return PushResult.DROPPED
            if worker in self.waiting:
                return PushResult.EXTRA
            self.waiting[worker] = number
            return PushResult.COMPLETES if self.is_complete else PushResult.WAITS
        if self.settings.max_age is not None and self.version - pulled > self.settings.max_age:
            return PushResult.TOO_OLD
        self.steps[worker] = self.steps.get(worker, 0) + 1
        self.waiting[worker] = number
        return PushResult.COMPLETES

    def complete(self, counted: Mapping[int, int]) -> None:
        """Register an update. `counted` has, for each worker in the update, the number of its push that was used."""
        self.version += 1
        self.counted |= counted
        self.waiting.clear()

    def may_pull(self, worker: int, wanted: int) -> bool:
        """Return True if a worker may have the parameters now.

        Args:
            wanted: lowest version that the worker accepts, in synchronous mode.
        """
        if self.settings.mode == "synchronous":
            return self.version >= wanted
        if self.settings.mode == "asynchronous":
            return True
        own = self.steps.get(worker, 0)
        return own - min(self.steps.values(), default=own) <= self.settings.staleness

    def awaited_by(self, worker: int) -> list[int]:
        """Return the workers whose gradients a pull of `worker` waits for."""
        if self.settings.mode == "synchronous":
            return sorted((self.steps.keys() | self.absent) - self.waiting.keys())
        own = self.steps.get(worker, 0)
        return sorted(one for one, step in self.steps.items() if own - step > self.settings.staleness)

    def stuck_because(self) -> str:
        """Return the reason for which no further synchronous update is possible; an empty text if one is possible."""
        if self.settings.mode != "synchronous":
            return ""
        able = len(self.waiting.keys() | self.steps.keys() | self.absent)
        if able >= self.needed:
            return ""
        return f"{able} of the {self.needed} workers that a synchronous update needs remain"
