"""Quoting of words for a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from windlass.base.text import one_line
from windlass.launch.launch_errors import LaunchError

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Characters of names and addresses, with an optional `user@` before, and `%eth0` after an IPv6 address.
_HOST_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_:\[][A-Za-z0-9_.:\]%-]*")


def shell_command(words: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None) -> str:
    """Return the text that makes a POSIX shell exec `words`, in the directory `cwd`, with `env` set.

    Raises:
        LaunchError: a word contains a NUL, or a name is not a valid variable name.
    """
    parts = [f"cd {_quote_word(cwd)} &&"] if cwd is not None else []
    assignments = [f"{check_variable_name(name)}={_quote_word(value)}" for name, value in (env or {}).items()]
    if assignments:
        parts.append("export " + " ".join(assignments) + " &&")
    return " ".join([*parts, "exec", *map(_quote_word, words)])


def check_variable_name(name: str) -> str:
    """Return `name` if a shell allows it as the name of an environment variable.

    Raises:
        LaunchError: `name` contains other characters.
    """
    if not _VARIABLE_NAME.fullmatch(name):
        raise LaunchError(f"{name!r} is not a variable name; use letters, digits and _, and no digit first")
    return name


def check_host_name(name: str) -> str:
    """Return `name` if it is a host's name or address, with an optional `user@`, that cannot be taken for an option.

    Raises:
        LaunchError: `name` begins with `-` or contains a character that names and addresses do not have.
    """
    if not _HOST_NAME.fullmatch(name):
        raise LaunchError(
            f"{one_line(name, 100)!r} is not a host name; write letters, digits, '.', '-', '_' or an address, "
            "and no '-' first"
        )
    return name


def _quote_word(word: str) -> str:
    if "\0" in word:
        raise LaunchError(f"{word!r} contains a NUL, which no argument or variable can")
    return shlex.quote(word)
