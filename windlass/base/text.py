"""Text for people: printable characters, plurals, and the nearest known name."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection, Iterable
from itertools import islice

# Control characters except newline and tab, line separators, bidirectional overrides, and lone surrogates: a terminal
# acts on the first, the second and third make a message read differently than it is, and UTF-8 has no surrogates.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MAX_NAME_LENGTH = 80
_MAX_CANDIDATES = 2000


def escape_unprintable(text: str) -> str:
    """Replace everything that a terminal would act on by an escape such as `\\x1b`. Newlines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return _UNPRINTABLE.sub(_escape_character, text.replace("\r\n", "\n"))


def one_line(text: str, max_length: int | None = None) -> str:
    """Make `text` printable, with newlines and tabs escaped too, and cut it to `longest` characters."""
    if max_length is not None and len(text) > max_length:
        text = f"{text[: max_length - 3]}..."
    return escape_unprintable(text).replace("\n", "\\n").replace("\t", "\\t")


def print_escaped(text: str, to_stderr: bool = False) -> None:
    """Print text that quotes names, paths or other hosts' output."""
    print(escape_unprintable(text), file=sys.stderr if to_stderr else sys.stdout)


def plural(count: int, noun: str, plural_noun: str | None = None) -> str:
    """Return the number with its noun: `1 rank`, `2 ranks`, `1,200 ranks`. `more` is an irregular plural."""
    return f"{count:,} {noun if count == 1 else plural_noun or noun + 's'}"


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most like `name`, or None if none is like it.

    The work is bounded: a very long name has no nearest, and only the first two thousand known names are compared.
    """
    if len(name) > _MAX_NAME_LENGTH:
        return None
    spelled = {candidate.lower(): candidate for candidate in islice(known, _MAX_CANDIDATES)}
    wanted = name.lower()
    # The best ratio that two lengths allow is below the cutoff for all others.
    like = [key for key in spelled if 2 * min(len(key), len(wanted)) >= cutoff * (len(key) + len(wanted))]
    found = difflib.get_close_matches(wanted, like, n=1, cutoff=cutoff)
    return spelled[found[0]] if found else None


def join_abridged(items: Collection[str], max_items: int = 20) -> str:
    """Join the first `most` items with commas, and say how many follow."""
    shown = ", ".join(islice(items, max_items))
    return shown if len(items) <= max_items else f"{shown} and {len(items) - max_items:,} more"


def _escape_character(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
