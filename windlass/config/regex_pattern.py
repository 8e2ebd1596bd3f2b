"""Regular expressions among the values, checked when they are read."""

from __future__ import annotations

import re

from pydantic_core import PydanticCustomError


def check_pattern(pattern: str) -> str:
    """`pattern`, if it is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise PydanticCustomError(
            "pattern", "Input should be a regular expression: {why}", {"why": str(error)}
        ) from None
    return pattern
