"""Trace of all ranks in Chrome's JSON format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from windlass.base.atomic_file import write_output
from windlass.tracing.rank_profile import RankProfile
from windlass.tracing.run_profile import RunProfile

STEPS_TRACK = 0
"""Number of the thread that shows the steps, in each process."""


def write_trace(run: RunProfile, path: Path) -> None:
    """Write the trace of all ranks; compressed if the name of the file ends in `.gz`.

    Raises:
        OSError: the file cannot be written.
    """
    write_document(chrome_trace(run), path)


def write_document(document: dict[str, Any], path: Path) -> None:
    """Write a trace; compressed if the name of the file ends in `.gz`.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps(document).encode()
    write_output(path, gzip.compress(text, 6) if path.suffix == ".gz" else text)


def chrome_trace(run: RunProfile) -> dict[str, Any]:
    """Return the trace as plain data: one process for each rank; times in us from the start of the first rank.

    Ranks on the host of the first rank have its monotonic clock. The times of ranks on other hosts are shifted by means
    of the wall clocks, which NTP aligns to about a millisecond.
    """
    first = run.ranks[0]
    shifts = {one.rank: _shift(one, first) for one in run.ranks}
    origin = min(one.bounds[0] + shifts[one.rank] for one in run.ranks)
    events: list[dict[str, Any]] = []
    for one in run.ranks:
        events += _rank_events(one, shifts[one.rank] - origin)
    return {"traceEvents": events, "displayTimeUnit": "ms", "windlass": run.as_json()}


def _shift(one: RankProfile, first: RankProfile) -> float:
    """Return the microseconds to add to a rank's times, to convert them to the clock of the first rank."""
    if one.host == first.host:
        return 0.0
    return (one.clock[1] - first.clock[1]) * 1e6 - (one.clock[0] - first.clock[0])


def _rank_events(one: RankProfile, shift: float) -> list[dict[str, Any]]:
    pid = one.rank
    named = {STEPS_TRACK: "steps", 1: "engine"}
    events: list[dict[str, Any]] = [
        metadata_event(pid, "process_name", {"name": f"rank {one.rank} on {one.host} ({one.device})"}),
        metadata_event(pid, "process_sort_index", {"sort_index": one.rank}),
    ]
    for number, (start, end) in enumerate(zip(one.bounds, one.bounds[1:], strict=False)):
        times = one.steps[number]
        arguments = {"compute ms": times.compute, "idle ms": times.idle, **times.waits}
        span = {"ts": start + shift, "dur": end - start}
        events.append(
            {
                "name": f"step {number + 1}",
                "cat": "windlass,steps",
                "ph": "X",
                "pid": pid,
                "tid": STEPS_TRACK,
                **span,
                "args": arguments,
            }
        )
    for event in one.events:
        shown = {key: value for key, value in event.items() if key != "track"}
        named.setdefault(event["tid"], event.get("track", f"thread {event['tid']}"))
        if "id" in event:  # viewers match ids over all processes, so make it unique
            shown["id"] = f"{pid}.{event['id']}"
        events.append({**shown, "pid": pid, "ts": event["ts"] + shift})
    for sample in one.memory:
        amounts = {kind: nbytes / 2**20 for kind, nbytes in sample.amounts.items()}
        events.append(
            {"name": "memory, MiB", "ph": "C", "pid": pid, "tid": 0, "ts": sample.time + shift, "args": amounts}
        )
    events += [metadata_event(pid, "thread_name", {"name": name}, tid) for tid, name in named.items()]
    events += [metadata_event(pid, "thread_sort_index", {"sort_index": tid}, tid) for tid in named]
    return events


def metadata_event(pid: int, name: str, arguments: dict[str, Any], tid: int = 0) -> dict[str, Any]:
    """Return an event that names or orders a process or a thread."""
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": arguments}
