"""What a rank says of itself, once a tick."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from windlass.watchdog.thread_location import ThreadLocation


class ProgramEnd(StrEnum):
    """Whether a rank's program is through."""

    RUNNING = ""
    DONE = "done"  # it ended, or is about to, without an exception
    FAILED = "failed"  # by an exception that nobody caught
    FAILED_IN_WAIT = "cut off"  # by an exception in a wait for other ranks, whose cause is as a rule another rank


@dataclass(frozen=True)
class Heartbeat:
    """One rank, at one beat.

    Attributes:
        host, pid: of the process; `host` tells machines apart, and boots of one.
        beat: counts up.
        place: where the main thread is.
        waits_s: for how long it has been in this one wait for other ranks; 0 where it is in none.
        idle_s: since the core last waited for other ranks.
        end: whether it is through.
        error: the traceback of what ended it.
        gone: ranks of this host whose processes are not there any more.
        left: what raised in a call that it makes with others, and was caught.
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
        """As JSON, for the board."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Heartbeat:
        """The inverse of `to_text`."""
        found = json.loads(text)
        location = found.pop("location")
        location["parameter_names"] = tuple(location["parameter_names"])
        found["program_end"] = ProgramEnd(found["program_end"])
        found["dead_local_ranks"] = tuple(found["dead_local_ranks"])
        return cls(**found, location=ThreadLocation(**location))
