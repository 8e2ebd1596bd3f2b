"""Problems of a configuration, as sentences with the key, the value and the fix."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from windlass.base.text import one_line

MAX_LISTED = 100
"""Maximum number of problems that are printed; the others are counted."""


class ProblemKind(StrEnum):
    """Kinds of problems, in the order of the report."""

    UNKNOWN = "unknown key"
    TYPE = "wrong type or value"
    CONTRADICTION = "contradiction"


@dataclass(frozen=True)
class ConfigProblem:
    """One error in a configuration."""

    kind: ProblemKind
    path: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        where = f" (line {self.line})" if self.line else ""
        return f"{one_line(self.path, 120)}: {self.message}{where}"


@dataclass(frozen=True)
class ConfigRefusal:
    """A key that is valid but requests an unsupported feature."""

    path: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{one_line(self.path, 120)} = {format_value(self.value)}: {self.reason}"


def format_value(value: Any) -> str:
    """Format a value as JSON, cut to 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def numbered_list(items: Sequence[object]) -> str:
    """Return one numbered line for each of the first items, and a count of the others."""
    lines = [f"  {number}. {item}" for number, item in enumerate(items[:MAX_LISTED], start=1)]
    if len(items) > MAX_LISTED:
        lines.append(f"  and {len(items) - MAX_LISTED:,} more")
    return "\n".join(lines)
