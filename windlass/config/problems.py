"""What is wrong with a configuration, as sentences that name the key, the value and the fix."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """The sorts of problems, in the order in which they are reported."""

    UNKNOWN = "unknown key"
    TYPE = "wrong type or value"
    CONTRADICTION = "contradiction"


@dataclass(frozen=True)
class Problem:
    """One thing that keeps a configuration from being read."""

    kind: Kind
    path: str
    sentence: str
    line: int | None = None

    def __str__(self) -> str:
        where = f" (line {self.line})" if self.line else ""
        return f"{self.path}: {self.sentence}{where}"


@dataclass(frozen=True)
class Refusal:
    """A key that was read and understood, and asks for something that is not done here."""

    path: str
    value: Any
    because: str

    def __str__(self) -> str:
        return f"{self.path} = {show(self.value)}: {self.because}"


def show(value: Any) -> str:
    """A value as JSON would spell it, cut to a readable length."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`, or None if none is like it."""
    spelled = {candidate.lower(): candidate for candidate in known}
    found = difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=0.6)
    return spelled[found[0]] if found else None


def listing(items: Iterable[object]) -> str:
    """One numbered line an item."""
    return "\n".join(f"  {number}. {item}" for number, item in enumerate(items, start=1))
