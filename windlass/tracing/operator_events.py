"""Events of torch.profiler for the trace: operators, kernels, and allocations of torch's allocators."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from windlass.base.bounded_json import parse_json

_CLOCK = "windlass clock"
_KERNELS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_SHOWN = _KERNELS | {"cpu_op", "user_annotation", "gpu_user_annotation"}

Interval = tuple[float, float]  # start and end, in the unit of the trace


@dataclass
class OperatorEvents:
    """Events of one rank. Times are in us of the monotonic clock.

    Attributes:
        events: complete events in Chrome's format, with `pid` and `tid` of torch.profiler.
        allocations: time and change in bytes, on the device of the run.
        kernels: intervals of the device's kernels and copies, without those of NCCL.
        nccl: intervals of NCCL's kernels.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    allocations: list[tuple[float, int]] = field(default_factory=list)
    kernels: list[Interval] = field(default_factory=list)
    nccl: list[Interval] = field(default_factory=list)


class OperatorProfiler:
    """Run of torch.profiler from `start` to `stop`. Times of its events are converted to the monotonic clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._profile = profile(activities=activities, profile_memory=True)
        self._clock_ns = 0

    def start(self) -> None:
        """Start recording, on the thread that will stop it."""
        self._profile.start()
        self._clock_ns = time.perf_counter_ns()
        with record_function(_CLOCK):  # the same moment on both clocks
            pass

    def stop(self) -> OperatorEvents:
        """Stop recording and return the events."""
        self._profile.stop()
        handle, name = tempfile.mkstemp(prefix="windlass-profile-", suffix=".json")
        os.close(handle)
        path = Path(name)
        try:
            self._profile.export_chrome_trace(name)
            trace = parse_json(path.read_bytes())
        finally:
            path.unlink(missing_ok=True)
        return read_events(trace["traceEvents"], self._clock_ns / 1000, on_gpu=self._on_gpu)


def read_events(events: Sequence[dict[str, Any]], clock: float, *, on_gpu: bool) -> OperatorEvents:
    """Return the events that the trace shows, with their times on the monotonic clock.

    Args:
        events: `traceEvents` of torch.profiler's Chrome trace.
        clock: time in us of the monotonic clock at which the range `windlass clock` began.
        on_gpu: take the allocations of the GPU, not of the CPU.
    """
    found = OperatorEvents()
    marks = [one["ts"] for one in events if one.get("name") == _CLOCK and one.get("ph") == "X"]
    shift = clock - marks[0] if marks else 0.0
    for one in events:
        category, name = one.get("cat", ""), one.get("name", "")
        if name == "[memory]":
            arguments = one.get("args", {})
            if (arguments.get("Device Type") == 1) == on_gpu:
                found.allocations.append((one["ts"] + shift, int(arguments.get("Bytes", 0))))
            continue
        if one.get("ph") != "X" or category not in _SHOWN or name == _CLOCK:
            continue
        start, duration = one["ts"] + shift, float(one.get("dur", 0))
        shown = {"name": name, "cat": category, "ph": "X", "ts": start, "dur": duration}
        found.events.append({**shown, "pid": one.get("pid"), "tid": one.get("tid")})
        if category in _KERNELS:
            (found.nccl if name.lower().startswith("nccl") else found.kernels).append((start, start + duration))
    found.allocations.sort()
    return found


def covered(intervals: Sequence[Interval], start: float, end: float) -> float:
    """Return the length of the union of `intervals` inside `[start, end)`."""
    total, reached = 0.0, start
    for first, last in sorted(intervals):
        first, last = max(first, reached), min(last, end)
        if last > first:
            total += last - first
            reached = last
    return total


def device_division(found: OperatorEvents, start: float, end: float) -> tuple[float, float, float]:
    """Return the times that a device spends in `[start, end)`: `(computing, NCCL without computing, idle)`."""
    computing = covered(found.kernels, start, end)
    busy = covered([*found.kernels, *found.nccl], start, end)
    return computing, busy - computing, end - start - busy
