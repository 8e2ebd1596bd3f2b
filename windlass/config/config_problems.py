"""What is wrong with a configuration, as sentences that name the key, the value and the fix."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from windlass.base.text import one_line

MAX_LISTED = 100
"""Longest list of problems that is printed; the rest is counted."""


class ProblemKind(StrEnum):
    """The sorts of problems, in the order in which they are reported."""

    UNKNOWN = "unknown key"
    TYPE = "wrong type or value"
    CONTRADICTION = "contradiction"


@dataclass(frozen=True)
class ConfigProblem:
    """One thing that keeps a configuration from being read."""

    kind: ProblemKind
    path: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        where = f" (line {self.line})" if self.line else ""
        return f"{one_line(self.path, 120)}: {self.message}{where}"


@dataclass(frozen=True)
class ConfigRefusal:
    """A key that was read and understood, and asks for something that is not done here."""

    path: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{one_line(self.path, 120)} = {format_value(self.value)}: {self.reason}"


def format_value(value: Any) -> str:
    """A value as JSON would spell it, cut to a readable length."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def numbered_list(items: Sequence[object]) -> str:
    """Return one numbered line for each of the first items, and a count of the others."""
    lines = [f"  {number}. {item}" for number, item in enumerate(items[:MAX_LISTED], start=1)]
    if len(items) > MAX_LISTED:
        lines.append(f"  and {len(items) - MAX_LISTED:,} more")
    return "\n".join(lines)
