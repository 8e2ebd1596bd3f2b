"""Heartbeat: record that each rank publishes once per tick of its watchdog thread."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from windlass.watchdog.thread_location import ThreadLocation


class ProgramEnd(StrEnum):
    """State of a rank's program."""

    RUNNING = ""
    DONE = "done"  # ended or about to end without an exception
    FAILED = "failed"  # ended by an uncaught exception
    FAILED_IN_WAIT = "cut off"  # ended by an exception in a wait for other ranks, usually caused by another rank


@dataclass(frozen=True)
class Heartbeat:
    """State of one rank at one tick.

    Attributes:
        rank: number of the rank.
        host, pid: the process. `host` identifies a machine, its boot and its PID namespace.
        beat: counter of heartbeats.
        location: position of the training thread.
        wait_s: seconds in the current wait for other ranks; 0 if the rank does not wait.
        idle_s: seconds since the last wait for other ranks; after an error, seconds since the error.
        program_end: state of the program.
        error: traceback of the exception that ended the program.
        dead_local_ranks: ranks of this host whose processes are gone.
        caught_error: error in a collective call that the script caught.
    """

    rank: int
    host: str
    pid: int
    beat: int
    location: ThreadLocation
    wait_s: float = 0.0
    idle_s: float = 0.0
    program_end: ProgramEnd = ProgramEnd.RUNNING
    error: str = ""
    dead_local_ranks: tuple[int, ...] = field(default=())
    caught_error: str = ""

    def to_json(self) -> str:
        """Return the heartbeat as JSON, for the control store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Heartbeat:
        """Parse the result of `to_json`."""
        found = json.loads(text)
        location = found.pop("location")
        location["parameter_names"] = tuple(location["parameter_names"])
        found["program_end"] = ProgramEnd(found["program_end"])
        found["dead_local_ranks"] = tuple(found["dead_local_ranks"])
        return cls(**found, location=ThreadLocation(**location))
