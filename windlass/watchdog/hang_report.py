"""Hang report: a table of all ranks below the tracebacks of failed ranks."""

from __future__ import annotations

from windlass.watchdog.hang_diagnosis import HangDiagnosis, format_rank_ranges
from windlass.watchdog.heartbeat import Heartbeat, ProgramEnd
from windlass.watchdog.peer_status import PeerState, PeerStatus
from windlass.watchdog.thread_location import ThreadLocation

COLUMN_HEADINGS = ("rank", "state", "for", "operation", "parameter (module)", "line")


def format_hang_report(diagnosis: HangDiagnosis, statuses: list[PeerStatus], reporting_rank: int) -> str:
    """Format the report: tracebacks of ranks that failed first, the diagnosis, and a table with one row for ranks in
    equal states.

    Args:
        reporting_rank: rank that prints the report. Its own traceback is already printed.
    """
    parts = []
    for one in statuses:
        if one.rank != reporting_rank and one.heartbeat is not None and one.heartbeat.program_end is ProgramEnd.FAILED:
            parts.append(f"rank {one.rank} failed first:\n{one.heartbeat.error.rstrip()}")
    parts.append(f"hang report: {diagnosis.headline}")
    return "\n".join([*parts, *_status_table(statuses)])


def _status_table(statuses: list[PeerStatus]) -> list[str]:
    groups: dict[tuple[str, ...], list[PeerStatus]] = {}
    for one in statuses:
        groups.setdefault(_status_cells(one), []).append(one)
    rows = [COLUMN_HEADINGS]
    for cells, members in groups.items():
        seconds = max(_seconds_in_state(one) for one in members)
        longest = f"{seconds:.0f} s" if members[0].heartbeat is not None else "-"
        rows.append((format_rank_ranges([one.rank for one in members]), cells[0], longest, *cells[1:]))  # type: ignore[arg-type]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMN_HEADINGS) - 1)]
    return [
        "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]


def _status_cells(status: PeerStatus) -> tuple[str, ...]:
    """Return state, operation, parameter and line of a rank."""
    record = status.heartbeat
    if record is None:
        return (str(status.state), "-", "-", "-")
    return (
        _describe_state(status, record),
        _describe_operation(status),
        _describe_parameters(record.location),
        record.location.source_line or "-",
    )


def _describe_state(status: PeerStatus, heartbeat: Heartbeat) -> str:
    if heartbeat.program_end is ProgramEnd.DONE:
        return "ended early"
    if heartbeat.program_end is ProgramEnd.FAILED:
        return "failed"
    if status.state is not PeerState.ALIVE:
        return str(status.state)
    if heartbeat.program_end is ProgramEnd.FAILED_IN_WAIT:
        return "cut off"
    return "waits" if heartbeat.wait_s else "alive"


def _describe_operation(status: PeerStatus) -> str:
    record = status.heartbeat
    assert record is not None
    place = record.location
    if (
        status.state in (PeerState.DEAD, PeerState.SILENT, PeerState.STOPPED)
        and record.program_end is ProgramEnd.RUNNING
    ):
        return f"last seen: {_describe_operation(PeerStatus(status.rank, record, PeerState.ALIVE))}"
    if place.operation:
        return f"{place.operation} ({place.engine_call})" if place.engine_call else place.operation
    if record.program_end is ProgramEnd.FAILED_IN_WAIT and place.engine_call:
        return place.engine_call
    return f"{place.engine_call}, waiting for no rank" if place.engine_call else "outside the engine"


def _describe_parameters(location: ThreadLocation) -> str:
    if not location.parameter_names:
        return "-"
    modules = {name.rpartition(".")[0] or "the root" for name in location.parameter_names}
    more = f" and {len(location.parameter_names) - 1} more" if len(location.parameter_names) > 1 else ""
    module = modules.pop() if len(modules) == 1 else _common_module(location.parameter_names)
    return f"{location.parameter_names[0]}{more} ({module})"


def _common_module(names: tuple[str, ...]) -> str:
    """Return the path of the innermost module that contains all parameters."""
    paths = [name.split(".")[:-1] for name in names]
    shared = []
    for steps in zip(*paths, strict=False):
        if len(set(steps)) > 1:
            break
        shared.append(steps[0])
    return ".".join(shared) or "the root"


def _seconds_in_state(status: PeerStatus) -> float:
    record = status.heartbeat
    if record is None:
        return 0.0
    if status.state in (PeerState.SILENT, PeerState.STOPPED, PeerState.DEAD):
        return status.silent_s
    return record.wait_s or record.idle_s
