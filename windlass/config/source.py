"""Getting at a configuration: a dict, a file of (relaxed) JSON, or base64 of JSON."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hjson

from windlass.base.errors import ConfigError
from windlass.config.lines import key_lines


@dataclass(frozen=True)
class Source:
    """A configuration as it was handed over: its data, a name for messages, and the lines of its dotted keys."""

    data: dict[str, Any]
    name: str = "config"
    lines: dict[str, int] = field(default_factory=dict)


def read(source: object) -> Source:
    """Read `source`: a dict (kept as it is, never written to), a path, or url-safe base64 of a JSON object.

    Raises:
        ConfigError: there is no such file, it cannot be read, it is not JSON even by the relaxed rules (comments,
            trailing and missing commas), a key is written twice, or it does not hold an object.
    """
    if isinstance(source, dict):
        return Source(source)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"a configuration is a dict, a path or a base64 string, not {type(source).__name__}")
    path = Path(source)
    if isinstance(source, str) and not _is_file(path):
        decoded = _from_base64(source)
        if decoded is not None:
            return _parse(decoded, "base64 configuration")
    return _parse(_text(path), str(path))


def _is_file(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a file name, or holds a zero byte: it can only be base64
        return False


def _from_base64(text: str) -> str | None:
    try:
        decoded = base64.urlsafe_b64decode(text.encode("ascii")).decode("utf-8")
    except (binascii.Error, UnicodeError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _text(path: Path) -> str:
    shown = str(path) if len(str(path)) < 200 else f"{str(path)[:80]}..."
    if not _is_file(path):
        raise ConfigError(f"there is no configuration file {shown}; give a path that exists, or base64 of JSON")
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read the configuration {shown}: {error}; it must be a UTF-8 text file") from error


def _parse(text: str, name: str) -> Source:
    lines = key_lines(text)
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return dict(pairs)

    try:
        data = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as strict:
        twice.clear()
        data = _relaxed(text, name, unique, strict)
    if twice:
        shown = [f"{key}{_where(key, lines)}" for key in sorted(set(twice))]
        raise ConfigError(f"{name}: written twice: {', '.join(shown)}; delete one of each")
    if not isinstance(data, dict):
        raise ConfigError(f"{name} holds {type(data).__name__}, not an object; put the keys between {{ and }}")
    return Source(data, name, {key: found[0] for key, found in lines.items()})


def _relaxed(text: str, name: str, unique: Any, strict: json.JSONDecodeError) -> Any:
    try:
        data = hjson.loads(text, object_pairs_hook=unique)
    except hjson.HjsonDecodeError as error:
        raise ConfigError(
            f"{name} is not JSON, even with comments and missing commas allowed: {error}\n"
            f"  by the strict rules: {strict}"
        ) from error
    if isinstance(data, str):
        raise ConfigError(f"{name} is not JSON: {strict}")
    return data


def _where(key: str, lines: dict[str, list[int]]) -> str:
    found = next((at for path, at in lines.items() if path.split(".")[-1] == key and len(at) > 1), None)
    return f" (lines {', '.join(map(str, found))})" if found else ""
