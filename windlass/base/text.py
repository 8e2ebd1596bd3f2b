"""Text for users: printable characters, plurals, and the nearest known name."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection, Iterable
from itertools import islice

# Control characters (not newline and tab), line separators, bidirectional overrides, and lone surrogates. A terminal
# executes control characters; separators and overrides change the displayed message; UTF-8 can't encode surrogates.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MAX_NAME_LENGTH = 80
_MAX_CANDIDATES = 2000


def escape_unprintable(text: str) -> str:
    """Replace unprintable characters by escapes such as `\\x1b`. Newlines and tabs stay; CRLF becomes a newline."""
    if text.isascii() and text.isprintable():
        return text
    return _UNPRINTABLE.sub(_escape_character, text.replace("\r\n", "\n"))


def one_line(text: str, max_length: int | None = None) -> str:
    """Escape unprintable characters, newlines and tabs in `text`, and truncate it to `max_length` characters."""
    # Escaping never shortens a text, so the characters behind the limit need no escaping.
    part = text if max_length is None else text[: max_length + 1]
    line = escape_unprintable(part).replace("\n", "\\n").replace("\t", "\\t")
    return line if max_length is None or len(line) <= max_length else f"{line[: max_length - 3]}..."


def print_escaped(text: str, to_stderr: bool = False) -> None:
    """Print text that quotes names, paths or output of other hosts, with unprintable characters escaped."""
    # `print` writes the line and its end separately, so lines of several threads would mix.
    stream = sys.stderr if to_stderr else sys.stdout
    if stream is None:  # the process was started with the stream closed
        return
    stream.write(escape_unprintable(text) + "\n")
    stream.flush()


def plural(count: int, noun: str, plural_noun: str | None = None) -> str:
    """Format a number with its noun: `1 rank`, `2 ranks`, `1,200 ranks`. `plural_noun` is an irregular plural."""
    return f"{count:,} {noun if count == 1 else plural_noun or noun + 's'}"


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to `name`, or None if none is similar.

    The work is bounded: a name above 80 characters has no nearest, and only the first two thousand known names are
    compared.
    """
    if len(name) > _MAX_NAME_LENGTH:
        return None
    spelled = {candidate.lower(): candidate for candidate in islice(known, _MAX_CANDIDATES)}
    requested = name.lower()
    # Skip names whose length alone rules out that they reach the cutoff.
    like = [key for key in spelled if 2 * min(len(key), len(requested)) >= cutoff * (len(key) + len(requested))]
    found = difflib.get_close_matches(requested, like, n=1, cutoff=cutoff)
    return spelled[found[0]] if found else None


def join_abridged(items: Collection[str], max_items: int = 20) -> str:
    """Join the first `max_items` items with commas, and add the number of the others."""
    shown = ", ".join(islice(items, max_items))
    return shown if len(items) <= max_items else f"{shown} and {len(items) - max_items:,} more"


def _escape_character(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
