"""Workspace of a compression: results of finished stages, from which a later call of the same command continues."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from windlass.base.atomic_file import make_directory
from windlass.base.bounded_json import parse_json
from windlass.base.errors import WindlassError
from windlass.base.log import logger
from windlass.compress.model_directory import write_json
from windlass.compress.partial_directory import lock_directory

_SETTINGS = "settings.json"


class CompressionWorkspace:
    """Directory `.OUT.work` next to the target `OUT`, with the results of finished stages. Results of other settings
    are discarded.

    The process locks the directory from the start of the first stage, or from construction if the directory exists,
    until `close` or `remove`.

    Args:
        target: directory of the model that is written.
        settings: all inputs of the stages, as JSON data.

    Raises:
        ModelError: another process uses the directory.
    """

    def __init__(self, target: Path, settings: Mapping[str, Any]) -> None:
        target = target.resolve()
        self.path = target.with_name(f".{target.name}.work")
        self._settings = parse_json(json.dumps(dict(settings), sort_keys=True).encode())
        self._lock: int | None = None
        if self.path.exists():
            self._lock = lock_directory(self.path)
        if self.path.exists() and self._read(_SETTINGS) != self._settings:
            logger.warning("%s was begun with other settings or from another model; it is computed anew", target)
            self.remove()

    def directory(self, stage: str, write: Callable[[Path], Any]) -> Path:
        """Return the directory of a stage. If the stage is not finished, `write` fills the directory first."""
        found = self.path / stage
        if not found.is_dir():
            self._create()
            begun = self.path / f".{stage}"
            if begun.exists():
                shutil.rmtree(begun)
            make_directory(begun)
            try:
                write(begun)
            except WindlassError:  # an invalid input: the same command cannot continue from here
                shutil.rmtree(begun)
                if {path.name for path in self.path.iterdir()} == {_SETTINGS}:
                    self.remove()
                raise
            begun.rename(found)
        return found

    def value(self, stage: str, compute: Callable[[], Any]) -> Any:
        """Return the JSON value of a stage. If it is not stored yet, `compute` it and store it."""
        name = f"{stage}.json"
        found = self._read(name)
        if found is None:
            self._create()
            found = compute()
            write_json(self.path / name, found)
        return found

    def kept(self, name: str) -> Path:
        """Return a folder for files of a stage that must survive an interruption."""
        self._create()
        make_directory(self.path / name)
        return self.path / name

    def remove(self) -> None:
        """Remove the directory, and release its lock."""
        if self.path.exists():
            shutil.rmtree(self.path)
        self.close()

    def close(self) -> None:
        """Release the lock of the directory, so that other processes can use it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _create(self) -> None:
        if self._lock is None:
            make_directory(self.path)
            self._lock = lock_directory(self.path)
            write_json(self.path / _SETTINGS, self._settings)

    def _read(self, name: str) -> Any:
        try:
            return parse_json((self.path / name).read_bytes())
        except (OSError, ValueError):
            return None
