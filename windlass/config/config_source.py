"""Sources of a configuration: a dict, a file of strict or relaxed JSON, or base64 of JSON."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hjson
from hjson.decoder import HjsonDecodeError, make_scanner

from windlass.base.bounded_input import read_bounded
from windlass.base.bounded_json import MAX_JSON_DEPTH, JsonError, exceeds_depth, parse_json
from windlass.base.errors import ConfigError
from windlass.base.text import join_abridged, one_line

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
_PROCESS_FILES = ("/dev/stdin", "/dev/fd/", "/proc/")
"""Beginnings of paths whose file may differ between processes."""


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


_MAX_BYTES = 16 * 2**20
_MAX_RELAXED_BYTES = 64 * 2**10
"""Size limit for relaxed JSON, whose parser takes quadratic time in bad cases."""


@dataclass(frozen=True)
class ConfigSource:
    """Data of a configuration, its name in messages, and the line of each dotted key.

    `not_strict_reason` is the reason why `json.load` would refuse the text; empty for strict JSON and for a dict.
    """

    data: dict[str, Any]
    name: str = "config"
    lines: dict[str, int] = field(default_factory=dict)
    not_strict_reason: str = ""


def read_source(source: object) -> ConfigSource:
    """Read `source`: a dict (never modified), a path, url-safe base64 of a JSON object, or a `ConfigSource`.

    Raises:
        ConfigError: the file does not exist or cannot be read; the text is not JSON even by the relaxed rules
            (comments, trailing and missing commas), is not an object, or exceeds a limit (of bytes, of nesting, of the
            digits of a number); or a key is written twice.
    """
    found = _read_any(source)
    _check_keys(found.data, found.name)
    return found


def source_for_ranks(source: str) -> str:
    """Return a source that every rank of a run can read: `source` itself, or base64 of its data if it is a pipe or
    another file that only this process can read, such as `/dev/stdin`.

    Raises:
        ConfigError: such a file holds no configuration.
    """
    path = Path(source)
    if not _is_file(path) or (path.is_file() and not os.path.abspath(source).startswith(_PROCESS_FILES)):
        return source
    return base64.urlsafe_b64encode(json.dumps(read_source(source).data).encode()).decode()


def _read_any(source: object) -> ConfigSource:
    if isinstance(source, ConfigSource):
        return source
    if isinstance(source, dict):
        if exceeds_depth(source, MAX_JSON_DEPTH):
            raise ConfigError(
                f"config is nested more than {MAX_JSON_DEPTH} levels deep, or contains itself; pass a plain dict"
            )
        return ConfigSource(source)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"a configuration is a dict, a path or a base64 string, not {type(source).__name__}")
    path = Path(source)
    if isinstance(source, str) and not _is_file(path):
        decoded = _from_base64(source)
        if decoded is not None:
            return _parse(decoded, "base64 configuration")
    return _parse(_read_text(path), str(path))


def _is_file(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a file name, or with a zero byte: such a string can only be base64
        return False


def _from_base64(text: str) -> str | None:
    try:
        decoded = base64.urlsafe_b64decode(text.encode("ascii")).decode("utf-8")
    except (binascii.Error, UnicodeError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _read_text(path: Path) -> str:
    shown = one_line(str(path) if len(str(path)) < 200 else f"{str(path)[:80]}...")
    if not _is_file(path):
        raise ConfigError(f"there is no configuration file {shown}; give a path that exists, or base64 of JSON")
    try:
        data = read_bounded(path, _MAX_BYTES)
        if data is None:
            raise ConfigError(f"{shown} has more than {_MAX_BYTES // 2**20} MiB; a configuration is a small text file")
        return data.decode()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read the configuration {shown}: {error}; it must be a UTF-8 text file") from error


def _parse(text: str, name: str) -> ConfigSource:
    name = one_line(name)
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return dict(pairs)

    bare = text.removeprefix("\ufeff")
    not_strict = "it begins with a byte order mark" if bare != text else ""
    if not bare.strip():
        raise ConfigError(f"{name} is empty; write an object, such as {{}}")
    try:
        data = parse_json(bare, unique)
    except JsonError as strict:
        twice.clear()
        not_strict = str(strict)
        data = _parse_relaxed(bare, name, unique, strict)
    if not isinstance(data, dict):
        raise ConfigError(f"{name} holds {type(data).__name__}, not an object; put the keys between {{ and }}")
    lines = find_key_lines(bare)
    if twice:
        shown = [f"{one_line(key, 100)}{_line_numbers(key, lines)}" for key in sorted(set(twice))]
        raise ConfigError(f"{name} has keys that are written twice: {join_abridged(shown)}; delete one of each")
    return ConfigSource(data, name, {key: found[0] for key, found in lines.items()}, not_strict)


class _RelaxedDecoder(hjson.HjsonDecoder):
    """hjson's decoder, except that a multi-line string is an error. hjson reads such strings in quadratic time, because
    it searches for the start of the line of each."""

    def __init__(self, pairs: Any) -> None:
        super().__init__(object_pairs_hook=pairs)
        self.parse_mlstring = self._refuse
        self.scan_once, self.scan_object_once = make_scanner(self)

    @staticmethod
    def _refuse(text: str, index: int) -> Any:
        raise HjsonDecodeError("Multi-line strings are not read", text, index)


def _parse_relaxed(text: str, name: str, unique: Any, strict: JsonError) -> Any:
    if len(text) > _MAX_RELAXED_BYTES:
        limit = f"comments and missing commas are allowed in files of up to {_MAX_RELAXED_BYTES // 2**10} KiB"
        raise ConfigError(f"{name} is not JSON: {strict} ({limit})")
    try:
        data = _RelaxedDecoder(unique).decode(text)
    except (ValueError, OverflowError, LookupError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else one_line(str(error), 300)
        raise ConfigError(
            f"{name} is not JSON, even with comments and missing commas allowed: {reason}\n"
            f"  by the strict rules: {strict}"
        ) from error
    if isinstance(data, str) or exceeds_depth(data, MAX_JSON_DEPTH):
        raise ConfigError(f"{name} is not JSON: {strict}")
    return data


def _check_keys(data: Any, name: str) -> None:
    items = list(data.items()) if isinstance(data, dict) else list(enumerate(data))
    for key, value in items:
        if isinstance(data, dict) and not isinstance(key, str):
            raise ConfigError(f"{name} has the key {key!r}, a {type(key).__name__}; keys are strings, as in JSON")
        for text in (key, value):
            if isinstance(text, str) and not _is_encodable(text):
                raise ConfigError(
                    f'{name} has half a surrogate pair in "{one_line(text, 100)}", which was cut inside a '
                    "character; write the character in full"
                )
        if isinstance(value, dict | list | tuple):
            _check_keys(value, name)


def _is_encodable(text: str) -> bool:
    """Return False for text with a lone surrogate, which no encoding can represent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _line_numbers(key: str, lines: dict[str, list[int]]) -> str:
    found = next((at for path, at in lines.items() if path.split(".")[-1] == key and len(at) > 1), None)
    return f" (lines {', '.join(map(str, found))})" if found else ""
