"""Line numbers of the keys in relaxed JSON, for messages that name the line to change."""

from __future__ import annotations

import re
from collections import defaultdict

# Each alternative matches in one pass, so that the time is linear in the text: an unclosed string ends with its line,
# an unclosed comment with the text.
_TOKEN = re.compile(
    r"""(?P<space>\s+|,)
      | (?P<comment>//[^\n]*|\#[^\n]*|/\*(?:.*?\*/|.*))
      | (?P<string>"(?:\\.|[^"\\\n])*+"?|'(?:\\.|[^'\\\n])*+'?)
      | (?P<open>[{\[])
      | (?P<close>[}\]])
      | (?P<colon>:)
      | (?P<word>[^\s,{}\[\]:"'\#/]+|.)
    """,
    re.VERBOSE | re.DOTALL,
)

_LONGEST_PATH = 300


def find_key_lines(text: str) -> dict[str, list[int]]:
    """Return the lines (from 1) on which each dotted key occurs. A key with two lines is written twice.

    Best effort: the scan follows brackets, strings and comments, and never fails. Elements of lists, and keys whose
    path is longer than 300 characters, have no path and are left out.
    """
    lines: dict[str, list[int]] = defaultdict(list)
    scopes: list[str | None] = []
    candidate, pending = "", ""
    line, candidate_line = 1, 1
    for token in _TOKEN.finditer(text):
        kind, word = token.lastgroup, token.group()
        if kind == "open":
            scopes.append(_join_path(scopes, pending) if word == "{" else None)
            candidate = pending = ""
        elif kind == "close":
            del scopes[-1:]
            candidate = pending = ""
        elif kind in ("string", "word"):
            candidate, candidate_line = word.strip("\"'"), line
            pending = ""
        elif kind == "colon" and candidate and scopes and scopes[-1] is not None:
            pending = candidate
            path = _join_path(scopes, pending)
            if path:
                lines[path].append(candidate_line)
            candidate = ""
        line += word.count("\n")
    return dict(lines)


def _join_path(scopes: list[str | None], key: str) -> str | None:
    if not scopes:
        return ""
    outer = scopes[-1]
    if outer is None or not key or len(outer) + len(key) > _LONGEST_PATH:
        return None
    return f"{outer}.{key}".lstrip(".")
