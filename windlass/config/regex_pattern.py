"""Validation of regular expressions when a configuration is loaded."""

from __future__ import annotations

import re

from pydantic_core import PydanticCustomError


def check_pattern(pattern: str) -> str:
    """Return `pattern` if it is a valid regular expression; raise a validation error otherwise."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise PydanticCustomError(
            "pattern", "Input should be a regular expression: {why}", {"why": str(error)}
        ) from None
    return pattern
