"""The table of all ranks that a report shows, and the tracebacks above it."""

from __future__ import annotations

from windlass.watchdog.place import Place
from windlass.watchdog.record import End, Record
from windlass.watchdog.sight import Sight, State
from windlass.watchdog.verdict import Verdict, spans

HEADS = ("rank", "state", "for", "operation", "parameter (module)", "line")


def report(verdict: Verdict, sights: list[Sight], teller: int) -> str:
    """The whole text: tracebacks of what failed first, the verdict, and a row a rank; equal rows are one.

    Args:
        teller: the rank that prints it, whose own traceback is printed already.
    """
    parts = []
    for one in sights:
        if one.rank != teller and one.record is not None and one.record.end is End.FAILED:
            parts.append(f"rank {one.rank} failed first:\n{one.record.error.rstrip()}")
    parts.append(f"hang report: {verdict.headline}")
    return "\n".join([*parts, *_table(sights)])


def _table(sights: list[Sight]) -> list[str]:
    groups: dict[tuple[str, ...], list[Sight]] = {}
    for one in sights:
        groups.setdefault(_cells(one), []).append(one)
    rows = [HEADS]
    for cells, members in groups.items():
        seconds = max(_seconds(one) for one in members)
        longest = f"{seconds:.0f} s" if members[0].record is not None else "-"
        rows.append((spans([one.rank for one in members]), cells[0], longest, *cells[1:]))  # type: ignore[arg-type]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS) - 1)]
    return [
        "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]


def _cells(sight: Sight) -> tuple[str, ...]:
    """State, operation, parameter, line."""
    record = sight.record
    if record is None:
        return (str(sight.state), "-", "-", "-")
    return (_state(sight, record), _operation(sight), _parameter(record.place), record.place.line or "-")


def _state(sight: Sight, record: Record) -> str:
    if record.end is End.DONE:
        return "ended early"
    if record.end is End.FAILED:
        return "failed"
    if sight.state is not State.ALIVE:
        return str(sight.state)
    if record.end is End.CUT_OFF:
        return "cut off"
    return "waits" if record.waits_s else "alive"


def _operation(sight: Sight) -> str:
    record = sight.record
    assert record is not None
    place = record.place
    if sight.state in (State.DEAD, State.SILENT, State.STOPPED) and record.end is End.NO:
        return f"last seen: {_operation(Sight(sight.rank, record, State.ALIVE))}"
    if place.operation:
        return f"{place.operation} ({place.call})" if place.call else place.operation
    if record.end is End.CUT_OFF and place.call:
        return place.call
    return f"{place.call}, waiting for no rank" if place.call else "outside the engine"


def _parameter(place: Place) -> str:
    if not place.names:
        return "-"
    modules = {name.rpartition(".")[0] or "the root" for name in place.names}
    more = f" and {len(place.names) - 1} more" if len(place.names) > 1 else ""
    module = modules.pop() if len(modules) == 1 else _common(place.names)
    return f"{place.names[0]}{more} ({module})"


def _common(names: tuple[str, ...]) -> str:
    """The innermost module that holds all of them."""
    paths = [name.split(".")[:-1] for name in names]
    shared = []
    for steps in zip(*paths, strict=False):
        if len(set(steps)) > 1:
            break
        shared.append(steps[0])
    return ".".join(shared) or "the root"


def _seconds(sight: Sight) -> float:
    record = sight.record
    if record is None:
        return 0.0
    if sight.state in (State.SILENT, State.STOPPED, State.DEAD):
        return sight.silent_s
    return record.waits_s or record.idle_s
