"""Trace files of a predicted step, in the format of `windlass profile`: Chrome's trace events, which Perfetto reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windlass.base.atomic_file import make_directory
from windlass.simulate.step_prediction import StepPrediction
from windlass.tracing.chrome_trace import STEPS_TRACK, metadata_event, write_document


def trace_events(prediction: StepPrediction) -> list[dict[str, Any]]:
    """Return the events: one process for each rank and one for all links, a thread for each stream or link, and for
    each rank a thread with the step itself."""
    processes: dict[str, int] = {}
    tracks: dict[str, dict[str, int]] = {}
    events: list[dict[str, Any]] = []
    for span in prediction.spans:
        if span.process not in processes:
            pid = processes[span.process] = len(processes)
            is_rank = span.process.startswith("rank ")
            tracks[span.process] = {"steps": STEPS_TRACK} if is_rank else {}
            events.append(metadata_event(pid, "process_name", {"name": span.process}))
            events.append(metadata_event(pid, "process_sort_index", {"sort_index": pid}))
            if is_rank:
                events.append(_complete("step 1", "steps", pid, STEPS_TRACK, 0.0, prediction.seconds))
        pid, named = processes[span.process], tracks[span.process]
        tid = named.setdefault(span.lane, len(named))
        event = _complete(span.name, span.lane if span.process != "links" else "link", pid, tid, span.start, span.stop)
        if span.nbytes:
            event["args"] = {"bytes": span.nbytes}
        events.append(event)
    for process, named in tracks.items():
        for name, tid in named.items():
            events.append(metadata_event(processes[process], "thread_name", {"name": name}, tid))
            events.append(metadata_event(processes[process], "thread_sort_index", {"sort_index": tid}, tid))
    return events


def write_trace(prediction: StepPrediction, path: Path) -> None:
    """Write the timeline; compressed if the name of the file ends in `.gz`. Open the file at ui.perfetto.dev, or in
    chrome://tracing."""
    make_directory(path.parent)
    document = {"traceEvents": trace_events(prediction), "displayTimeUnit": "ms", "windlass": prediction.as_json()}
    write_document(document, path)


def _complete(name: str, kind: str, pid: int, tid: int, start: float, stop: float) -> dict[str, Any]:
    """Return an event with a duration. `start` and `stop` are in seconds."""
    span = {"ts": start * 1e6, "dur": (stop - start) * 1e6}
    return {"name": name, "cat": f"windlass,{kind}", "ph": "X", "pid": pid, "tid": tid, **span}
