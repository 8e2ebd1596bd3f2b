"""Table entry of one DeepSpeed name: its windlass object, and its compatibility."""

from __future__ import annotations

import enum
import importlib
from dataclasses import dataclass
from typing import Any


class NameStatus(enum.Enum):
    """Compatibility of windlass's object with DeepSpeed's object of the same name."""

    WORKS = "works"
    DIFFERS = "differs"
    REFUSED = "refused"


@dataclass(frozen=True)
class StandInEntry:
    """Table entry of one DeepSpeed name.

    Args:
        status: compatibility of the name.
        target: `module:qualified.name` of the object; only `module` if the name is a module; empty if refused.
        note: for DIFFERS, the difference; for REFUSED, one sentence with the reason and an alternative.
    """

    status: NameStatus
    target: str = ""
    note: str = ""

    def resolve(self, name: str) -> Any:
        """Return the object that `name` refers to.

        A refused name resolves to a placeholder that raises when it is used.
        """
        if self.status is NameStatus.REFUSED:
            from windlass.compat.not_built import make_refused_type

            return make_refused_type(name, self.note)
        module, _, path = self.target.partition(":")
        found: Any = importlib.import_module(module)
        for part in path.split(".") if path else ():
            found = getattr(found, part)
        return found


def works(target: str, note: str = "") -> StandInEntry:
    """Create an entry for a name that behaves as in DeepSpeed."""
    return StandInEntry(NameStatus.WORKS, target, note)


def differs(target: str, note: str) -> StandInEntry:
    """Create an entry for a name that behaves differently; `note` describes the difference."""
    return StandInEntry(NameStatus.DIFFERS, target, note)


def refused(reason: str) -> StandInEntry:
    """Create an entry for a name that can be imported but raises when it is used."""
    return StandInEntry(NameStatus.REFUSED, "", reason)
