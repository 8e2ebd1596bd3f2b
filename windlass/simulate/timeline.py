"""Trace files of a predicted step, in Chrome's trace event format, which Perfetto reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from windlass.base.atomic_file import make_directory, write_atomically
from windlass.simulate.step_prediction import StepPrediction


def trace_events(prediction: StepPrediction) -> list[dict[str, Any]]:
    """Return the events: one process for each rank and one for all links, a thread for each stream or link."""
    processes: dict[str, int] = {}
    lanes: dict[tuple[str, str], int] = {}
    events: list[dict[str, Any]] = []
    for span in prediction.spans:
        if span.process not in processes:
            processes[span.process] = len(processes)
            events.append(_metadata("process_name", processes[span.process], 0, span.process))
        process, lane = processes[span.process], (span.process, span.lane)
        if lane not in lanes:
            lanes[lane] = len(lanes)
            events.append(_metadata("thread_name", process, lanes[lane], span.lane))
        event = {
            "name": span.name,
            "ph": "X",
            "pid": process,
            "tid": lanes[lane],
            "ts": span.start * 1e6,
            "dur": (span.stop - span.start) * 1e6,
        }
        if span.nbytes:
            event["args"] = {"bytes": span.nbytes}
        events.append(event)
    return events


def write_trace(prediction: StepPrediction, path: Path) -> None:
    """Write the timeline. Open the file at ui.perfetto.dev, or in chrome://tracing."""
    make_directory(path.parent)
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": trace_events(prediction)})
    write_atomically(path, text.encode())


def _metadata(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
