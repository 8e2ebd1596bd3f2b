"""Parsing of JSON from files and other hosts, with limits on nesting and on the length of numbers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

MAX_JSON_DEPTH = 100
"""Maximum nesting. Real files have at most ten levels, and recursion fails at about a thousand."""


class JsonError(ValueError):
    """Error for text that is not JSON, or that exceeds a limit. The message of a syntax error gives line and column."""


def parse_json(
    text: str | bytes,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
    max_depth: int = MAX_JSON_DEPTH,
    finite_numbers: bool = False,
) -> Any:
    """Parse JSON.

    Args:
        text: a string, or bytes in UTF-8, UTF-16 or UTF-32.
        object_pairs_hook: called for each object with its keys and values in order; its result replaces the object.
        max_depth: maximum nesting of objects and lists.
        finite_numbers: refuse NaN, Infinity and numbers beyond float64, which Python's parser accepts.

    Raises:
        JsonError: the text is not JSON, is nested too deeply, or has a number with thousands of digits or one that
            `finite_numbers` refuses.
    """
    numbers: dict[str, Any] = {}
    if finite_numbers:
        numbers = {"parse_constant": _refuse_constant, "parse_float": _finite_float, "parse_int": _finite_int}
    try:
        data = json.loads(text, object_pairs_hook=object_pairs_hook, **numbers)
    except JsonError:
        raise
    except json.JSONDecodeError as error:
        raise JsonError(f"{error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise JsonError(_too_deep_message(max_depth)) from error
    except UnicodeError as error:
        raise JsonError(f"it is not text: {error}") from error
    except ValueError as error:  # the only remaining case: an integer above sys.get_int_max_str_digits()
        raise JsonError(f"a number has too many digits: {error}") from error
    if exceeds_depth(data, max_depth):
        raise JsonError(_too_deep_message(max_depth))
    return data


def exceeds_depth(data: Any, max_depth: int) -> bool:
    """Return True if dicts, lists and tuples in `data` are nested more deeply than `max_depth`, or cyclically."""
    row = [data]
    for _ in range(max_depth + 1):
        row = [
            inner
            for item in row
            if isinstance(item, dict | list | tuple)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not row:
            return False
    return True


def _refuse_constant(name: str) -> Any:
    raise JsonError(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise JsonError(f"the number {text[:40]} is beyond the range of float64")
    return value


def _finite_int(text: str) -> int:
    value = int(text)
    if len(text) > sys.float_info.max_10_exp:  # fewer digits are always in range
        _finite_float(text)
    return value


def _too_deep_message(max_depth: int) -> str:
    return f"objects and lists are nested more than {max_depth} levels deep"
