"""What a rank says of itself, once a tick."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from windlass.watchdog.place import Place


class End(StrEnum):
    """Whether a rank's program is through."""

    NO = ""
    DONE = "done"  # it ended, or is about to, without an exception
    FAILED = "failed"  # by an exception that nobody caught
    CUT_OFF = "cut off"  # by an exception in a wait for other ranks, whose cause is as a rule another rank


@dataclass(frozen=True)
class Record:
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
    place: Place
    waits_s: float = 0.0
    idle_s: float = 0.0
    end: End = End.NO
    error: str = ""
    gone: tuple[int, ...] = field(default=())
    left: str = ""

    def to_text(self) -> str:
        """As JSON, for the board."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Record:
        """The inverse of `to_text`."""
        found = json.loads(text)
        place = found.pop("place")
        place = Place(place["call"], place["operation"], tuple(place["names"]), place["line"])
        return cls(**{**found, "place": place, "end": End(found["end"]), "gone": tuple(found["gone"])})
