"""Listing of a checkpoint directory: finished checkpoints with their problems, and remains of unfinished saves."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint.checkpoint_directory import INDEX_FILE, LATEST, is_any_checkpoint, is_checkpoint, read_latest
from windlass.checkpoint.checkpoint_index import CheckpointIndex, ChunkRecord, TensorRecord
from windlass.checkpoint.checksum import crc32 as crc32_of
from windlass.checkpoint.foreign_formats import foreign_formats
from windlass.checkpoint.safetensors_file import TensorFile, dtype_from_code
from windlass.checkpoint.stored_checkpoint import read_any_index

_UNFINISHED_NAME = re.compile(r"^\.(?P<tag>.+?)(?:\.\w{8})?\.(?P<step>writing|replaced|removing)$")
_CHECKSUM_CHUNK_BYTES = 1 << 22  # bytes that are checksummed at a time


@dataclass(frozen=True)
class ListedCheckpoint:
    """Finished checkpoint.

    Attributes:
        step: number of optimizer steps; None if the checkpoint does not record it.
        nbytes: total size of its files.
        stage, ranks: ZeRO stage and number of ranks of the run that saved it; None if they cannot be read.
        written: time of the save, in seconds since 1970.
        trainable_only: frozen parameters were left out.
        latest: True if the file `latest` names this checkpoint.
        problem: description of the damage; empty if none was found.
        verified: the bytes were compared with their checksums, up to the first damage.
    """

    tag: str
    step: int | None
    nbytes: int
    stage: int | None
    ranks: int | None
    written: float
    trainable_only: bool
    latest: bool
    problem: str
    verified: bool


@dataclass(frozen=True)
class UnfinishedSave:
    """Hidden directory of a running or interrupted save, of a replaced checkpoint, or of an interrupted removal."""

    name: str
    nbytes: int
    meaning: str


@dataclass(frozen=True)
class CheckpointListing:
    """Result of `list_checkpoints`. `problem` describes an unreadable or dangling `latest`; empty if there is none."""

    checkpoints: tuple[ListedCheckpoint, ...]
    leftovers: tuple[UnfinishedSave, ...]
    latest: str | None
    problem: str

    @property
    def is_damaged(self) -> bool:
        """True if `latest` or any checkpoint has a problem."""
        return bool(self.problem) or any(listed.problem for listed in self.checkpoints)


def list_checkpoints(directory: str | os.PathLike[str], *, verify: bool = False) -> CheckpointListing:
    """List the checkpoints in `directory`, oldest first. Nothing is changed.

    Args:
        verify: read every byte and compare it with its crc32; else check only the index and the file sizes.

    Raises:
        CheckpointError: the directory does not exist, cannot be read, or is a checkpoint itself.
    """
    root = Path(directory)
    try:
        children = sorted(root.iterdir())
    except OSError as error:
        raise CheckpointError(f"the checkpoint directory {root} cannot be read: {error.strerror}") from error
    if is_any_checkpoint(root):
        raise CheckpointError(f"{root} is a checkpoint itself; give its parent directory")
    problem, latest = "", None
    try:
        latest = read_latest(root)
    except CheckpointError as error:
        problem = str(error)
    visible = [path for path in children if path.name[0] != "."]
    found = [path for path in visible if is_any_checkpoint(path)]
    listed = []
    for path in found:
        with suppress(FileNotFoundError):  # removed meanwhile by a run with `keep_last`
            listed.append(_describe_checkpoint(path, path.name == latest, verify))
    listed.sort(key=lambda one: one.written)
    former = root / f".{latest}.replaced" / INDEX_FILE  # `find_checkpoint` reads this checkpoint if the tag is missing
    if latest is not None and not any(one.latest for one in listed) and not former.is_file():
        problem = f"{root / LATEST} names {latest!r}, and there is no such checkpoint; pass a tag, or write one into it"
    return CheckpointListing(tuple(listed), tuple(_unfinished_saves(root, children)), latest, problem)


def find_damage(path: Path, index: CheckpointIndex) -> str:
    """Return a description of damaged bytes in a checkpoint; empty if there are none. Needs only some megabytes of
    memory."""
    by_file: dict[str, list[tuple[TensorRecord, ChunkRecord]]] = {}
    for record in index.tensors.values():
        for chunk in record.chunks:
            by_file.setdefault(chunk.file, []).append((record, chunk))
    if is_checkpoint(path):
        scratch = torch.empty(_CHECKSUM_CHUNK_BYTES, dtype=torch.uint8, device="cpu")
        for file_name, entries in by_file.items():
            try:
                with TensorFile(path / file_name) as file:
                    for record, chunk in entries:
                        _check_chunk(file, record, chunk, scratch)
            except CheckpointError as error:
                return str(error)
    # a checkpoint of windlass has files of another format too if `checkpoint.format` requests that format
    problems = (one.find_damage(path, by_file.keys()) for one in foreign_formats())
    return next((problem for problem in problems if problem), "")


def _check_chunk(file: TensorFile, record: TensorRecord, chunk: ChunkRecord, scratch: torch.Tensor) -> None:
    nbytes = torch.Size(chunk.sizes).numel() * dtype_from_code(record.dtype).itemsize
    file.check_size(chunk.entry, nbytes)
    crc32 = 0
    for first in range(0, nbytes, _CHECKSUM_CHUNK_BYTES):
        crc32 = crc32_of(
            file.read_part(chunk.entry, first, scratch[: min(_CHECKSUM_CHUNK_BYTES, nbytes - first)]), crc32
        )
    file.compare_crc32(chunk.entry, crc32, chunk.crc32)


def _describe_checkpoint(path: Path, latest: bool, verify: bool) -> ListedCheckpoint:
    problem, index, done = "", None, False
    try:
        index, _ = read_any_index(path)
        problem, done = (find_damage(path, index), True) if verify else ("", False)
    except CheckpointError as error:
        problem = str(error)
    plain_data: dict[str, Any] = index.plain if index is not None and isinstance(index.plain, dict) else {}
    layout, progress = _dict(plain_data.get("layout")), _dict(plain_data.get("engine"))
    return ListedCheckpoint(
        tag=path.name,
        step=_number(progress.get("global_steps")),
        nbytes=_size(path),
        stage=_number(layout.get("stage")),
        ranks=index.world_size if index is not None else None,
        written=(path / INDEX_FILE if (path / INDEX_FILE).is_file() else path).stat().st_mtime,
        trainable_only=bool(plain_data.get("trainable_only")),
        latest=latest,
        problem=problem,
        verified=done,
    )


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _size(path: Path) -> int:
    total = 0
    for child in path.rglob("*"):
        with suppress(FileNotFoundError):
            total += child.lstat().st_size if child.is_file() else 0
    return total


def _unfinished_saves(root: Path, children: list[Path]) -> Iterator[UnfinishedSave]:
    for path in children:
        found = _UNFINISHED_NAME.match(path.name)
        if found is None or not path.is_dir():
            continue
        tag = found["tag"]
        meanings = {
            "writing": f"a save of {tag!r} that is running, or was killed; in the second case the next save removes it",
            "replaced": f"the previous {tag!r}, which "
            + ("the next save removes" if (root / tag).exists() else "loads as that tag"),
            "removing": f"remains of {tag!r}, whose removal was interrupted",
        }
        yield UnfinishedSave(path.name, _size(path), meanings[found["step"]])
