"""What the table says of one old name: where its meaning lives, and how far it is the same."""

from __future__ import annotations

import enum
import importlib
from dataclasses import dataclass
from typing import Any


class State(enum.Enum):
    """How far a name means what it meant."""

    WORKS = "works"
    DIFFERS = "differs"
    REFUSED = "refused"


@dataclass(frozen=True)
class Entry:
    """One row.

    Args:
        state: see `State`.
        home: `module:qualified.name` of the object; `module` alone where the name is a module; empty where refused.
        note: how it differs, or in one sentence why it is refused and what to do.
    """

    state: State
    home: str = ""
    note: str = ""

    def resolve(self, name: str) -> Any:
        """The object that `name` stands for. What is refused resolves too, and raises when it is used."""
        if self.state is State.REFUSED:
            from windlass.compat.refusal import refusal

            return refusal(name, self.note)
        module, _, path = self.home.partition(":")
        found: Any = importlib.import_module(module)
        for part in path.split(".") if path else ():
            found = getattr(found, part)
        return found


def works(home: str, note: str = "") -> Entry:
    """A name that does what it did."""
    return Entry(State.WORKS, home, note)


def differs(home: str, how: str) -> Entry:
    """A name that is there and does its work in another way, which `how` tells."""
    return Entry(State.DIFFERS, home, how)


def refused(why: str) -> Entry:
    """A name that can be imported and raises, in one sentence, when it is used."""
    return Entry(State.REFUSED, "", why)
