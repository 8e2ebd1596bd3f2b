"""Cache of the open data files of a checkpoint, with a limit on their number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from windlass.checkpoint.safetensors_file import TensorFile

_OPEN = 64  # maximum number of open files; a checkpoint has about one file for each rank that saved it


class OpenFileCache:
    """Files of one checkpoint by name, at most 64 of them open.

    The least recently used file is closed to open another one, and is reopened when it is read.

    Args:
        path: the checkpoint's directory.
        open_file: opens a data file by its path.
    """

    def __init__(self, path: Path, open_file: Callable[[Path], TensorFile] = TensorFile) -> None:
        self._path, self._open_file = path, open_file
        self._files: dict[str, TensorFile] = {}  # the least recently used first

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()

    def get(self, name: str) -> TensorFile:
        """Return the file of that name, and keep it in the cache."""
        file = self._files.pop(name, None) or self._open_file(self._path / name)
        self._files[name] = file
        if len(self._files) > _OPEN:
            list(self._files.values())[-_OPEN - 1].close()
        return file
