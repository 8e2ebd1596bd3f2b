"""What the table says of one old name: where its meaning lives, and how far it is the same."""

from __future__ import annotations

import enum
import importlib
from dataclasses import dataclass
from typing import Any


class NameStatus(enum.Enum):
    """How far a name means what it meant."""

    WORKS = "works"
    DIFFERS = "differs"
    REFUSED = "refused"


@dataclass(frozen=True)
class StandInEntry:
    """One row.

    Args:
        state: see `State`.
        home: `module:qualified.name` of the object; `module` alone where the name is a module; empty where refused.
        note: how it differs, or in one sentence why it is refused and what to do.
    """

    status: NameStatus
    target: str = ""
    note: str = ""

    def resolve(self, name: str) -> Any:
        """The object that `name` stands for. What is refused resolves too, and raises when it is used."""
        if self.status is NameStatus.REFUSED:
            from windlass.compat.not_built import make_refused_type

            return make_refused_type(name, self.note)
        module, _, path = self.target.partition(":")
        found: Any = importlib.import_module(module)
        for part in path.split(".") if path else ():
            found = getattr(found, part)
        return found


def works(target: str, note: str = "") -> StandInEntry:
    """A name that does what it did."""
    return StandInEntry(NameStatus.WORKS, target, note)


def differs(target: str, note: str) -> StandInEntry:
    """A name that is there and does its work in another way, which `how` tells."""
    return StandInEntry(NameStatus.DIFFERS, target, note)


def refused(reason: str) -> StandInEntry:
    """A name that can be imported and raises, in one sentence, when it is used."""
    return StandInEntry(NameStatus.REFUSED, "", reason)
