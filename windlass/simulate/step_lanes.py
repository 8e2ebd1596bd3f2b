"""Streams of one representative rank, with its computation, collectives and transfers in the order of the step."""

from __future__ import annotations

from collections import Counter, defaultdict

from windlass.simulate.collective_cost import CollectiveCost, CollectiveCosts, Phase, RankPattern
from windlass.simulate.event_loop import EventLoop, LinkKey, SimulatedTask
from windlass.simulate.layer_work import Segment

COMPUTE = "compute"


class RankLanes:
    """Streams of one rank, which stands for all ranks of its pipeline stage.

    Args:
        rates: Bytes a second of each link; links are added at their first use.
        coarse: Collectives that block are summed up, see `blocking`.
    """

    def __init__(
        self, rank: int, costs: CollectiveCosts, loop: EventLoop, rates: dict[LinkKey, float], *, coarse: bool = False
    ) -> None:
        self.rank, self.process = rank, f"rank {rank}"
        self.costs, self._loop, self._rates = costs, loop, rates
        self.moved: dict[str, Counter[str]] = defaultdict(Counter)
        self.waits_for: list[SimulatedTask] = []
        self.last: SimulatedTask | None = None
        self.flops = 0.0
        self._pending, self._label = 0.0, ""
        self._coarse = coarse
        self._sums: dict[str, dict[str, Phase]] = {}  # sums of phases, by axis and by the link that limits the phase
        self._known: dict[int, tuple[Segment, float, float]] = {}  # times and FLOPs of segments, by their id

    def compute(self, label: str, segment: Segment) -> None:
        """Add the computation of a segment. Consecutive segments without a collective between them become one task."""
        if id(segment) not in self._known:
            self._known[id(segment)] = segment, segment.seconds(self.costs.cluster.device), segment.flops
        _, seconds, flops = self._known[id(segment)]
        self._pending += seconds
        self.flops += flops
        self._label = self._label or label

    def spend(self, label: str, seconds: float) -> None:
        """Occupy the device for some time."""
        self._pending += seconds
        self._label = self._label or label

    def flush(self) -> SimulatedTask | None:
        """Add the computation so far as one task, and return the rank's last task."""
        if self._pending > 0 or self.waits_for or self._sums:
            task = SimulatedTask(
                self._label or "wait", COMPUTE, ((self.process, COMPUTE),), self._pending, {}, self.waits_for
            )
            self.last = self._loop.add(task)
            self.waits_for, self._pending, self._label = [], 0.0, ""
            sums, self._sums = self._sums, {}
            for axis, phases in sums.items():
                cost = CollectiveCost("sum", tuple(phases.values()))
                self.last = self.phases(cost, f"collectives along {axis}", axis, axis, [self.last])
                self.waits_for = [self.last] if self.last is not None else []
        return self.last

    def blocking(
        self, axis: str, operation: str, nbytes: float, pattern: RankPattern, *, label: str, counted: dict[str, int]
    ) -> None:
        """Add a collective that the next computation waits for.

        If the lanes are coarse, all collectives of an axis between two calls of `flush` become one collective after the
        computation, in which all phases with the same slowest link are one phase. The total time is the same, unless
        other transfers use the links at that moment.
        """
        if self.costs.size(pattern) == 1:
            return
        if not self._coarse:
            computed = self.flush()
            self.block_on(
                self.collective(axis, operation, nbytes, pattern, label=label, after=[computed], counted=counted)
            )
            return
        for name, received in counted.items():
            self.moved[axis][name] += received
        sums = self._sums.setdefault(axis, {})
        for phase in self.costs.cost(pattern, operation, nbytes).phases:
            # Phases run one after the other, so the times of phases with different slowest links must be added.
            slowest = phase.slowest_link(self.costs.cluster)
            sums[slowest] = sums.get(slowest, Phase(0.0, {})).plus(phase)

    def collective(
        self,
        axis: str,
        operation: str,
        nbytes: float,
        pattern: RankPattern,
        *,
        label: str,
        after: list[SimulatedTask | None],
        counted: dict[str, int] | None = None,
        algorithm: str = "auto",
        stream: str = "",
    ) -> SimulatedTask | None:
        """Add a collective; None if the group has one rank.

        Args:
            nbytes: Bytes of the full buffer, see `CollectiveCosts.cost`.
            counted: Bytes that this rank receives, by name of the operation in `engine.report()`.
        """
        if self.costs.size(pattern) == 1:
            return None
        cost = self.costs.cost(pattern, operation, nbytes, algorithm)
        for name, received in (counted or {}).items():
            self.moved[axis][name] += received
        return self.phases(cost, f"{operation} {label}", axis, stream or axis, after, sum((counted or {}).values()))

    def phases(
        self,
        cost: CollectiveCost,
        label: str,
        kind: str,
        stream: str,
        after: list[SimulatedTask | None],
        nbytes: int = 0,
    ) -> SimulatedTask | None:
        """Add the phases of a collective or message in sequence, and return the last task."""
        before = [one for one in after if one is not None]
        task = None
        lane = stream if self.costs.cluster.overlaps else COMPUTE
        for number, phase in enumerate(cost.phases):
            loads = {self._link(name): value for name, value in phase.loads.items()}
            task = SimulatedTask(
                label, kind, ((self.process, lane),), phase.latency, loads, before, 0 if number else nbytes
            )
            self._loop.add(task)
            before = [task]
        return task

    def transfer(
        self, link: str, rate: float, nbytes: float, label: str, kind: str, after: list[SimulatedTask | None]
    ) -> SimulatedTask:
        """Add a transfer over this rank's own link between device and host memory, or between host and disk."""
        self._rates[self.process, link] = rate
        before = [one for one in after if one is not None]
        return self._loop.add(
            SimulatedTask(
                label, kind, ((self.process, link),), 0.0, {(self.process, link): nbytes}, before, int(nbytes)
            )
        )

    def work_on_host(self, label: str, seconds: float, after: list[SimulatedTask | None]) -> SimulatedTask:
        """Add computation of the host's processors."""
        before = [one for one in after if one is not None]
        return self._loop.add(SimulatedTask(label, "host", ((self.process, "host"),), seconds, {}, before))

    def block_on(self, task: SimulatedTask | None) -> None:
        """Make the next computation wait for a task."""
        if task is not None:
            if self._pending > 0 or self._sums:
                self.flush()
            self.waits_for.append(task)

    def _link(self, kind: str) -> LinkKey:
        key = (self.process, kind)
        if key not in self._rates:
            self._rates[key] = self.costs.cluster.link_part(kind).usable
        return key
