"""Words for a shell, so that it hands on exactly what it was given."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from windlass.base.text import one_line
from windlass.launch.launch_errors import LaunchError

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What a name or an address may consist of; `user@` before it, `%eth0` behind an address of IPv6.
_HOST_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_:\[][A-Za-z0-9_.:\]%-]*")


def shell_command(words: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None) -> str:
    """The text that makes a POSIX shell become `words`, in the directory `cwd`, with `env` set.

    Raises:
        LaunchError: a NUL, which no argument can hold, or a name that is none of a variable.
    """
    parts = [f"cd {_quote_word(cwd)} &&"] if cwd is not None else []
    assignments = [f"{check_variable_name(name)}={_quote_word(value)}" for name, value in (env or {}).items()]
    if assignments:
        parts.append("export " + " ".join(assignments) + " &&")
    return " ".join([*parts, "exec", *map(_quote_word, words)])


def check_variable_name(name: str) -> str:
    """The name of a variable of the environment, as a shell allows it.

    Raises:
        LaunchError: it holds other characters.
    """
    if not _VARIABLE_NAME.fullmatch(name):
        raise LaunchError(f"{name!r} is no name of a variable; use letters, digits and _, and no digit first")
    return name


def check_host_name(name: str) -> str:
    """A host's name or address, perhaps with `user@` before it, that no program could take for an option or a list.

    Raises:
        LaunchError: it begins with `-` or holds a character that names and addresses do not have.
    """
    if not _HOST_NAME.fullmatch(name):
        raise LaunchError(
            f"{one_line(name, 100)!r} is no name of a host; write letters, digits, '.', '-', '_' or an address, "
            "and no '-' first"
        )
    return name


def _quote_word(word: str) -> str:
    if "\0" in word:
        raise LaunchError(f"{word!r} holds a NUL, which neither an argument nor a variable can")
    return shlex.quote(word)
