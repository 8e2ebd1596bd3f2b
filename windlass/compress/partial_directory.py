"""Model directory that is being written: complete tensors, and a journal of them, so that a stopped run can continue.

[Note: partial directory] `.NAME.partial` next to the target holds the safetensors files in their final size,
`plan.json` and a `journal`. A tensor's bytes are on the disk before its line in the journal. A later run with an equal
plan skips the tensors of the journal. The directory is renamed when it has every tensor.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from windlass.base.atomic_file import make_directory, open_new, replace_directory
from windlass.base.bounded_json import parse_json
from windlass.base.errors import ModelError
from windlass.base.log import logger
from windlass.compress.model_directory import INDEX, SINGLE, write_json
from windlass.kernels.weight_format import PackedTensorForm, PackedWeight
from windlass.storage.safetensors_header import encode_safetensors_header

FileForms = Mapping[str, Mapping[str, PackedTensorForm]]
"""For each tensor of the source, by its name: name, dtype and shape of each tensor that is written for it."""

_PLAN, _JOURNAL = "plan.json", "journal"
BOOKKEEPING = (_PLAN, _JOURNAL)
"""Files of a run, which a complete directory has only if the run was stopped right after the directory was renamed."""
_COMPLETE = " complete"  # end of each complete line of a journal


class WrittenTensors(Protocol):
    """Complete tensors of a directory, by the name of the source tensor.

    Attributes:
        done: names of the source tensors whose written tensors are complete.
    """

    done: set[str]

    def read(self, source: str) -> PackedWeight:
        """Return the tensors that were written for `source`, which is in `done`."""
        ...


class PartialDirectory:
    """Safetensors files with a fixed place for every tensor, written in any order; see [Note: partial directory].

    Args:
        target: directory that `finish` creates.
        forms: tensors to be written, by the name of their source.
        plan: settings of the run, of JSON types. An existing partial directory with another plan is discarded.
        file_bytes: maximum bytes of a file, unless the file has the tensors of a single source.

    Raises:
        ModelError: another process writes the directory.
    """

    def __init__(self, target: Path, forms: FileForms, plan: Mapping[str, Any], file_bytes: int) -> None:
        self.target, self._forms = target.resolve(), forms  # a symbolic link stays, and its target is replaced
        self.path = self.target.with_name(f".{self.target.name}.partial")
        self._files = _split_into_files(forms, file_bytes)
        self._offsets: dict[str, tuple[str, int]] = {}
        self._headers: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        self._place()
        self._plan = parse_json(_json_bytes({**plan, "sizes": self._sizes}))
        self._lock: int | None = None
        self._prepare()
        self.done = self._read_journal()

    def _read_journal(self) -> set[str]:
        """Return the names of the source tensors whose written tensors are complete."""
        path = self.path / _JOURNAL
        lines = path.read_text().split("\n") if path.is_file() else []
        return {line.removesuffix(_COMPLETE) for line in lines if line.endswith(_COMPLETE)} & set(self._forms)

    def write(self, source: str, tensors: PackedWeight) -> None:
        """Write the tensors of a source, record them as complete, and remove them from `tensors`.

        Raises:
            ModelError: a tensor has another dtype or shape than `forms` states.
        """
        for part, form in self._forms[source].items():
            tensor = tensors.pop(part)
            if tensor.dtype != form.dtype or tuple(tensor.shape) != form.shape:
                raise ModelError(f"tensor {part!r} is {tensor.dtype} {tuple(tensor.shape)}, not {form}")
            name, offset = self._offsets[part]
            with open(self.path / name, "r+b") as file:
                file.seek(offset)
                file.write(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().data)
                file.flush()
                os.fsync(file.fileno())
            del tensor
        with open_new(self.path / _JOURNAL, "a") as journal:
            journal.write(f"\n{source}{_COMPLETE}\n")  # on a new line: a stopped run may have left a part of a line
            journal.flush()
            os.fsync(journal.fileno())
        self.done.add(source)

    def read(self, source: str) -> PackedWeight:
        """Return the tensors that were written for `source`, which is in `done`."""
        found: PackedWeight = {}
        for part in self._forms[source]:
            with safe_open(self.path / self._offsets[part][0], framework="pt") as file:
                found[part] = file.get_tensor(part)
        return found

    def finish(self, config: Mapping[str, Any], companions: list[Path]) -> None:
        """Write `config`, copy `companions`, and rename the directory to its target, which is replaced.

        Raises:
            ModelError: a tensor is missing.
        """
        missing = set(self._forms) - self._read_journal()
        if missing:
            raise ModelError(f"{self.path} lacks {len(missing)} tensors, first {min(missing)!r}; run the command again")
        write_json(self.path / "config.json", dict(config))
        for path in companions:
            with path.open("rb") as file, open_new(self.path / path.name, "wb") as copy:
                shutil.copyfileobj(file, copy)
        if len(self._files) > 1:
            weight_map = {part: name for part, (name, _) in self._offsets.items()}
            total = sum(form.nbytes for parts in self._forms.values() for form in parts.values())
            write_json(self.path / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        replace_directory(self.path, self.target)
        # remove these files only now, so that a run that is stopped before the move can continue
        for name in (_PLAN, _JOURNAL):
            (self.target / name).unlink()

    def close(self) -> None:
        """Release the lock of the directory, so that other processes can write it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _place(self) -> None:
        """Choose file and offset of every tensor."""
        for name, sources in self._files.items():
            parts = {part: form for source in sources for part, form in self._forms[source].items()}
            header = encode_safetensors_header({part: (form.dtype, form.shape) for part, form in parts.items()}, {})
            offset = len(header)
            for part, form in parts.items():
                self._offsets[part] = (name, offset)
                offset += form.nbytes
            self._headers[name], self._sizes[name] = header, offset

    def _prepare(self) -> None:
        """Create the directory, or continue an earlier one with the same plan."""
        make_directory(self.path)
        self._lock = lock_directory(self.path)
        if (self.path / _PLAN).is_file():
            if self._is_continued():
                return
            logger.warning("%s was begun with other settings or from another model; it is written anew", self.target)
        for path in self.path.iterdir():
            path.unlink()
        for name, header in self._headers.items():
            with open_new(self.path / name) as file:
                file.write(header)
                file.truncate(self._sizes[name])
        # write the plan last, so that it exists only if all headers are complete
        with open_new(self.path / _PLAN) as file:
            file.write(_json_bytes(self._plan))

    def _is_continued(self) -> bool:
        try:
            found = parse_json((self.path / _PLAN).read_bytes())
            sizes = {name: (self.path / name).stat().st_size for name in self._sizes}
        except (OSError, ValueError):
            return False
        return bool(found == self._plan and sizes == self._sizes)


def lock_directory(path: Path) -> int:
    """Lock a directory, and return its file descriptor. No other process writes the directory until the descriptor is
    closed.

    Raises:
        ModelError: another process writes the directory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ModelError(f"another process writes {path}; wait for its end") from error
    return descriptor


def check_target(target: Path, sources: Iterable[str | Path], *, overwrite: bool) -> None:
    """Check that a directory can be written, before anything is computed.

    Args:
        sources: files and directories that are read.

    Raises:
        ModelError: the target is a file, is not empty and `overwrite` is False, holds other files than those of
            a model, or is or contains a source.
    """
    if target.exists() and not target.is_dir():
        raise ModelError(f"{target} is a file; choose a directory")
    if target.exists() and not overwrite and any(target.iterdir()):
        raise ModelError(f"{target} exists; choose another directory, or overwrite it")
    to = target.resolve()
    for source in map(Path, sources):
        if to in (source.resolve(), *source.resolve().parents):
            what = "is" if to == source.resolve() else "contains"
            raise ModelError(f"{target} {what} {source}, which is read; choose another directory")
    if target.exists() and any(target.iterdir()) and not (target / "config.json").is_file():
        raise ModelError(  # e.g. a home directory
            f"{target} holds something else than a model: it has no config.json, and overwriting would delete all of "
            "it; choose another directory, or delete it yourself"
        )
    folders = sorted(path.name for path in target.iterdir() if path.is_dir()) if target.exists() else []
    if folders:
        raise ModelError(  # e.g. the output of a training, with its checkpoints
            f"{target} holds the folder {folders[0]}, which is not part of a model and would be deleted; choose "
            "another directory, or delete it yourself"
        )


@contextlib.contextmanager
def open_partial_directory(
    target: Path, forms: FileForms, plan: Mapping[str, Any], file_bytes: int
) -> Iterator[PartialDirectory]:
    """Yield a partial directory, which stays on the disk if the `with` block raises.

    Raises:
        ModelError: another process writes the directory, or the disk fails or is full.
    """
    try:
        partial = PartialDirectory(target, forms, plan, file_bytes)
        try:
            yield partial
        finally:
            partial.close()
    except OSError as error:
        raise ModelError(
            f"{target} cannot be written: {error}; free some space and run the command again, which continues, or "
            f"choose another directory"
        ) from error


def _split_into_files(forms: FileForms, file_bytes: int) -> dict[str, list[str]]:
    """Return the names of the source tensors of each file, in order."""
    files: list[list[str]] = [[]]
    size = 0
    for name, parts in forms.items():
        here = sum(form.nbytes for form in parts.values())
        if size + here > file_bytes and files[-1]:
            files.append([])
            size = 0
        files[-1].append(name)
        size += here
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{one + 1:05d}-of-{len(files):05d}.safetensors": sources for one, sources in enumerate(files)}


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
