"""Record of a run as one file of JSON lines, which `windlass report` reads."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from windlass.base.atomic_file import make_directory, open_new
from windlass.base.bounded_json import JsonError, parse_json
from windlass.base.errors import ConfigError, DataError
from windlass.base.log import logger
from windlass.observe.environment import hardware_facts, version_facts
from windlass.observe.environment.try_fact import try_fact

RECORD_FILE = "run.jsonl"
RECORD_FORMAT = 1
"""Version of the format. Increased when a key is removed or changes its meaning, not when keys are added."""
_SECRETS = frozenset({"api_key", "token", "password"})
_MAX_WARNINGS = 1000
_READ_BYTES = 1 << 16


class RunRecord:
    """Writer of a record. Each line is flushed; a disk that fails ends the record, not the run.

    Lines have the key `kind`: `run` (once for each start), `step`, `checkpoint`, `log` (warnings and errors), `end`.

    Args:
        path: the file; lines are appended to those of earlier starts of the same run.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            make_directory(path.parent)
            _drop_incomplete_line(path)
            self._stream: TextIO | None = open_new(path, "a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"jsonl_monitor: cannot write {path} ({error.strerror or error}); change jsonl_monitor.output_path"
            ) from error
        self._path, self._handler = path, _WarningHandler(self)
        logger.addHandler(self._handler)

    def write(self, kind: str, **values: Any) -> None:
        """Write one line. Numbers that are not finite become null."""
        if self._stream is None:
            return
        try:
            self._stream.write(json.dumps(_plain({"kind": kind, "time": time.time(), **values})) + "\n")
            self._stream.flush()
        except OSError as error:
            self._stream = None
            logger.error(f"jsonl_monitor: cannot write {self._path} ({error}); nothing more is written in this run")

    def close(self) -> None:
        """Write the end of the run and close the file. A second call does nothing."""
        logger.removeHandler(self._handler)
        if self._stream is not None:
            self.write("end")
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class _WarningHandler(logging.Handler):
    """Handler that writes the first 1,000 warnings and errors of the log to a record."""

    def __init__(self, record: RunRecord) -> None:
        super().__init__(logging.WARNING)
        self._record, self._count = record, 0

    def emit(self, record: logging.LogRecord) -> None:
        if self._count < _MAX_WARNINGS:
            self._count += 1
            self._record.write("log", level=record.levelname.lower(), message=record.getMessage())


def machine_facts() -> dict[str, Any]:
    """Return properties of this machine that explain the speed of a run. If a property cannot be determined, its value
    is the reason."""
    return {
        "host": os.uname().nodename,
        "cpu": try_fact(hardware_facts.cpu_facts),
        "memory": try_fact(hardware_facts.memory_facts),
        "devices": try_fact(hardware_facts.gpu_devices),
        "torch": try_fact(lambda: version_facts.installed_version("torch")),
        "windlass": try_fact(lambda: version_facts.installed_version("windlass")),
    }


def without_secrets(config: Any) -> Any:
    """Return a configuration with the values of keys such as `api_key` replaced by "(left out)"."""
    if isinstance(config, Mapping):
        return {
            key: "(left out)" if str(key).lower() in _SECRETS and value else without_secrets(value)
            for key, value in config.items()
        }
    return [without_secrets(item) for item in config] if isinstance(config, list | tuple) else config


def read_record(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the parsed lines of a record in order. An incomplete last line, as after a crash, is left out.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object with a kind.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except JsonError as error:
            if number == len(lines):  # a line without its newline: the run was killed while writing it
                return
            raise DataError(f"{path}, line {number}: {error}; this is not a record of jsonl_monitor") from error
        if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
            raise DataError(f"{path}, line {number}: it has no kind; this is not a record of jsonl_monitor")
        yield value


def _drop_incomplete_line(path: Path) -> None:
    """Remove an incomplete last line, left by a start that was killed: the next line would be appended to it."""
    if not path.is_file():
        return
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        kept = end
        while kept:
            begin = max(0, kept - _READ_BYTES)
            file.seek(begin)
            newline = file.read(kept - begin).rfind(b"\n")
            kept = begin + newline + 1
            if newline >= 0:
                break
        if kept < end:
            file.truncate(kept)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)
