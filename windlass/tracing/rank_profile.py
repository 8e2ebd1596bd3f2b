"""Profile of one rank as plain data, which is sent to rank 0."""

from __future__ import annotations

import json
import time
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any

from windlass.tracing.memory_timeline import HeldMemory, MemorySample, memory_timeline
from windlass.tracing.operator_events import OperatorEvents, device_division
from windlass.tracing.range_log import DISK, LOCAL_WAITS, RangeLog, TimeDivision

NCCL = "NCCL kernels"


@dataclass(frozen=True)
class StepTimes:
    """Time of one step on one rank, in ms, see [Note: division of time].

    Attributes:
        total: time from the end of the previous step to the end of this one.
        compute, idle: the two parts of the time in which the rank does not wait.
        waits: time of the waits for each resource.
        phases: time of forward, backward, step and update, waits included.
    """

    total: float
    compute: float
    idle: float
    waits: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def waiting(self) -> float:
        """Time of all waits."""
        return sum(self.waits.values())

    @property
    def own(self) -> float:
        """Time in which the rank did not wait for another rank."""
        return self.total - sum(ms for wire, ms in self.waits.items() if wire not in LOCAL_WAITS)


@dataclass
class RankProfile:
    """Profile of one rank. Times of events, steps and samples are in us of the rank's monotonic clock.

    Attributes:
        clock: one moment in us of the monotonic clock and in s since 1970, to align the clocks of several hosts.
        bounds: start of the profile, then the end of each step.
        steps: times of each step.
        events: events in Chrome's format without `pid`.
        memory: samples of the memory.
        has_activations: False if `memory` lacks activations, because operators were not recorded.
    """

    rank: int
    host: str
    device: str
    transport: str
    clock: tuple[float, float]
    bounds: list[float]
    steps: list[StepTimes]
    events: list[dict[str, Any]]
    memory: list[MemorySample]
    has_activations: bool = True

    def pack(self) -> bytes:
        """Return the profile as compressed bytes."""
        return zlib.compress(json.dumps(asdict(self)).encode(), 1)

    @classmethod
    def unpack(cls, data: bytes) -> RankProfile:
        """Return the profile that `pack` packed."""
        values = json.loads(zlib.decompress(data))
        values["clock"] = tuple(values["clock"])
        values["steps"] = [StepTimes(**one) for one in values["steps"]]
        values["memory"] = [MemorySample(**one) for one in values["memory"]]
        return cls(**values)


def make_rank_profile(
    log: RangeLog,
    operators: OperatorEvents | None,
    held: HeldMemory,
    *,
    rank: int,
    host: str,
    device: str,
    transport: str,
) -> RankProfile:
    """Return the profile of this rank, made from the recorded data."""
    start, end = log.steps[0].start / 1000, log.steps[-1].end / 1000
    changes = [(when / 1000, holder, size) for when, holder, size in log.held_bytes]
    allocations = operators.allocations if operators is not None else None
    return RankProfile(
        rank=rank,
        host=host,
        device=device,
        transport=transport,
        clock=(time.perf_counter_ns() / 1000, time.time()),
        bounds=[start, *(one.end / 1000 for one in log.steps)],
        steps=[_step_times(one, operators) for one in log.steps],
        events=[*_range_events(log, start, end), *_shown_operators(operators, start, end)],
        memory=memory_timeline(held, changes, allocations, start, end),
        has_activations=allocations is not None,
    )


def _step_times(one: TimeDivision, operators: OperatorEvents | None) -> StepTimes:
    """Return the times of a step. On a GPU, compute, waits and idle are those of its kernels, not of the host."""
    compute, idle = one.compute / 1e6, one.idle / 1e6
    waits = {wire: ns / 1e6 for wire, ns in sorted(one.waits.items(), key=lambda item: -item[1])}
    phases = {name: ns / 1e6 for name, ns in one.phases.items()}
    start, end = one.start / 1000, one.end / 1000
    if operators is not None and operators.kernels:
        compute, wire, idle = (us / 1000 for us in device_division(operators, start, end))
        disk = min(waits.get(DISK, 0.0), idle)
        waits, idle = {NCCL: wire, **({DISK: disk} if disk else {})}, idle - disk
    return StepTimes((one.end - one.start) / 1e6, compute, idle, waits, phases)


def _range_events(log: RangeLog, start: float, end: float) -> list[dict[str, Any]]:
    threads = {log.main_thread: 1}
    found: list[dict[str, Any]] = []
    for one in log.ranges:
        if one.end / 1000 < start or one.start / 1000 > end:
            continue
        what = f"wait: {one.name}" if one.kind == "wait" else " ".join(part for part in (one.kind, one.name) if part)
        name = f"{what} {one.detail}" if one.detail else what
        tid = threads.setdefault(one.thread, len(threads) + 1)
        span = {"ts": one.start / 1000, "dur": (one.end - one.start) / 1000}
        found.append({"name": name, "cat": f"windlass,{one.kind}", "ph": "X", "tid": tid, **span})
    for number, flight in enumerate(log.flights):
        if flight.end / 1000 < start or flight.start / 1000 > end:
            continue
        common = {"name": f"{flight.kind} {flight.name}", "cat": "windlass,flight", "id": number, "tid": 1}
        found.append({**common, "ph": "b", "ts": flight.start / 1000})
        found.append({**common, "ph": "e", "ts": flight.end / 1000})
    return found


def _shown_operators(operators: OperatorEvents | None, start: float, end: float) -> list[dict[str, Any]]:
    """Return operators and kernels inside the profile, on tracks after those of windlass's own ranges."""
    tracks: dict[Any, int] = {}
    found = []
    for one in operators.events if operators is not None else ():
        if one["ts"] < start or one["ts"] > end:
            continue
        gpu = one["cat"] != "cpu_op" and one["cat"] != "user_annotation"
        track = (gpu, one["pid"], one["tid"])
        tid = tracks.setdefault(track, 100 + len(tracks))
        shown = {key: value for key, value in one.items() if key != "pid"}
        found.append({**shown, "tid": tid, "track": f"GPU stream {one['tid']}" if gpu else f"operators {len(tracks)}"})
    return found
