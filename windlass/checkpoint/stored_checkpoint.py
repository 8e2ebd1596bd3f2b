"""Checkpoint open for reading in one process: its plain data, and its tensors, in full or in parts."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint import plain_data
from windlass.checkpoint.checkpoint_directory import (
    INDEX_FILE,
    find_checkpoint,
    foreign_format_of,
    is_any_checkpoint,
    is_checkpoint,
)
from windlass.checkpoint.checkpoint_index import CheckpointIndex, TensorRecord, check_entries, read_index
from windlass.checkpoint.checkpoint_state import RESERVED_PREFIXES
from windlass.checkpoint.checksum import crc32 as crc32_of
from windlass.checkpoint.engine_data import require_engine_data
from windlass.checkpoint.foreign_formats import ForeignFormat, ParameterOrder, foreign_formats
from windlass.checkpoint.fragment_boxes import flat_start, is_contiguous
from windlass.checkpoint.open_file_cache import OpenFileCache
from windlass.checkpoint.safetensors_file import TensorFile, dtype_from_code

_PART_NUMEL = 1 << 20  # elements of a part


def split_checkpoint_path(path: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """Split a user's checkpoint path into directory and tag.

    The tag is None if the path names none: the latest checkpoint of the directory is meant.
    """
    given = Path(path)
    if is_any_checkpoint(given):
        full = given.absolute() if given.name in ("", "..") else given
        return full.parent, full.name
    return given, None


def read_any_index(
    path: Path, parameter_order: ParameterOrder | None = None
) -> tuple[CheckpointIndex, ForeignFormat | None]:
    """Return the index of the checkpoint directory `path`, and the format of its files; None: windlass's own.

    Args:
        parameter_order: parameter order of the optimizer that loads the states. Without it, states that a format stores
            by number are left out.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or of an unsupported kind.
    """
    if is_checkpoint(path):
        return read_index(path), None
    found = foreign_format_of(path)
    if found is None:
        names = ", ".join(one.name for one in foreign_formats())
        raise CheckpointError(
            f"{path} has neither {INDEX_FILE} nor the files of another format ({names}); load another one"
        )
    return found.read_index(path, parameter_order), found


class StoredCheckpoint:
    """Finished checkpoint, open for reading, without a process group. Use it in a `with` statement.

    If a read inside the statement fails after another save replaced the checkpoint, the error names that cause.

    Args:
        directory: the directory that was passed to the save.
        tag: tag of the checkpoint; None: the tag in `latest`.
        parameter_order: see `read_any_index`.

    Attributes:
        tag, path: its tag, and the directory of that name.
        files: its data files.
        plain: the plain data that all ranks share.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """

    def __init__(
        self, directory: str | os.PathLike[str], tag: str | None = None, parameter_order: ParameterOrder | None = None
    ) -> None:
        self._open(*find_checkpoint(directory, tag), parameter_order, slice(None))

    @classmethod
    def from_path(
        cls, path: Path, parameter_order: ParameterOrder | None = None, checked_files: slice = slice(None)
    ) -> StoredCheckpoint:  # noqa: B008
        """Open the checkpoint whose files are in `path`, which may be a staging directory.

        Args:
            checked_files: slice of the sorted data files whose headers are compared with the index; other ranks check
                the others.
        """
        stored = cls.__new__(cls)
        stored._open(path.name, path, parameter_order, checked_files)
        return stored

    def _open(self, tag: str, path: Path, parameter_order: ParameterOrder | None, checked_files: slice) -> None:
        self.tag, self.path = tag, path
        self._identity = _index_identity(path)  # before the index is read, so that a replacement is detected
        self.index, foreign = read_any_index(self.path, parameter_order)
        self.files = OpenFileCache(self.path, TensorFile if foreign is None else foreign.open_file)
        with self:
            check_entries(self.index, sorted(self.index.files)[checked_files], self._file)
            tensors = {name: self.read_full(name) for name in plain_data.tensor_names(self.index.plain)}
        self.plain: dict[str, Any] = plain_data.decode(self.index.plain, tensors)

    @property
    def is_replaced(self) -> bool:
        """True if the path has another index now: a save has replaced the checkpoint, or it was removed."""
        return _index_identity(self.path) != self._identity

    @property
    def replaced_message(self) -> str:
        """Message of the error for a read that failed because of `is_replaced`."""
        return f"{self.path} was replaced or removed by another save while it was read; load again"

    def read_rank_plain(self, rank: int) -> dict[str, Any] | None:
        """Return the plain data of one of the ranks that saved; None if there were fewer ranks or the rank saved
        none."""
        if rank >= self.index.world_size or self.index.ranks[rank] is None:
            return None
        with self:
            tensors = {name: self.read_full(name) for name in plain_data.tensor_names(self.index.ranks[rank])}
        found: dict[str, Any] = plain_data.decode(self.index.ranks[rank], tensors)
        return found

    @cached_property
    def engine_data(self) -> dict[str, Any]:
        """`plain`, checked to be the data of an engine. Raises CheckpointError if it is not."""
        return require_engine_data(self.plain, self.path)

    def __enter__(self) -> StoredCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.files.__exit__(kind, error, trace)
        if isinstance(error, CheckpointError) and self.is_replaced:  # index and files may be of two saves
            raise CheckpointError(f"{self.replaced_message} ({error})") from error

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of tensors with this prefix, except tensors inside plain data."""
        return [
            name for name in self.index.tensors if name.startswith(prefix) and not name.startswith(RESERVED_PREFIXES)
        ]

    def __contains__(self, name: str) -> bool:
        return name in self.index.tensors

    def meta_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor on the meta device with the shape and dtype of the tensor `name`."""
        record = self._record(name)
        return torch.empty(record.shape, dtype=dtype_from_code(record.dtype), device="meta")

    def outline(self) -> dict[str, torch.Tensor]:
        """Return every named tensor on the meta device. Tensors of one shape and dtype are one object."""
        found: dict[tuple[object, ...], torch.Tensor] = {}
        outline = {}
        for name in self.names():
            record = self.index.tensors[name]
            kind = record.shape, record.dtype
            if kind not in found:
                found[kind] = self.meta_tensor(name)
            outline[name] = found[kind]
        return outline

    def read_full(self, name: str) -> torch.Tensor:
        """Return the full tensor on the CPU.

        Raises:
            CheckpointError: there is no tensor of that name, or its file is damaged.
        """
        record = self._record(name)
        full = torch.empty(record.shape, dtype=dtype_from_code(record.dtype), device="cpu")
        flat = full.view(-1)
        for chunk in record.chunks:
            file = self._file(chunk.file)
            if is_contiguous(record.shape, chunk.sizes):
                start = flat_start(record.shape, chunk.offsets)
                file.read_into(chunk.entry, flat[start : start + math.prod(chunk.sizes)], chunk.crc32)
            else:
                box = torch.empty(chunk.sizes, dtype=full.dtype, device="cpu")
                file.read_into(chunk.entry, box, chunk.crc32)
                corner = zip(chunk.offsets, chunk.sizes, strict=True)
                full[tuple(slice(offset, offset + size) for offset, size in corner)] = box
        return full

    def iter_parts(self, name: str, part_numel: int = _PART_NUMEL) -> Iterator[torch.Tensor]:
        """Yield the full tensor as consecutive flat parts of at most `part_numel` elements.

        Each part is overwritten by the next one.

        Raises:
            CheckpointError: as `read_full`; damage is detected at the end of the damaged box (stored part of the
                tensor).
        """
        record = self._record(name)
        if not all(is_contiguous(record.shape, chunk.sizes) for chunk in record.chunks):
            yield from self.read_full(name).view(-1).split(part_numel)  # only in files that windlass did not write
            return
        buffer = torch.empty(
            min(part_numel, math.prod(record.shape)), dtype=dtype_from_code(record.dtype), device="cpu"
        )
        for chunk in sorted(record.chunks, key=lambda chunk: flat_start(record.shape, chunk.offsets)):
            file, numel, crc32 = self._file(chunk.file), math.prod(chunk.sizes), 0
            file.check_size(chunk.entry, numel * buffer.element_size())
            if chunk.crc32 is None:
                file.verify_checksum(chunk.entry, None)
            for first in range(0, numel, part_numel):
                part = buffer[: min(part_numel, numel - first)]
                raw = file.read_part(chunk.entry, first * buffer.element_size(), part)
                crc32 = crc32_of(raw, crc32) if chunk.crc32 is not None else 0
                yield part
            file.compare_crc32(chunk.entry, crc32, chunk.crc32)

    def iter_span(self, name: str, start: int, stop: int, part_numel: int = _PART_NUMEL) -> Iterator[torch.Tensor]:
        """Yield elements `[start, stop)` of the flat tensor as consecutive parts, as `iter_parts` does.

        If only a part of a box (stored part of the tensor) is needed, the full box is read first, because its checksum
        covers all of it.

        Raises:
            CheckpointError: as `iter_parts`.
        """
        record = self._record(name)
        if not all(is_contiguous(record.shape, chunk.sizes) for chunk in record.chunks):
            yield from self.read_full(name).view(-1)[start:stop].split(part_numel)
            return
        buffer = torch.empty(min(part_numel, stop - start), dtype=dtype_from_code(record.dtype), device="cpu")
        for chunk in sorted(record.chunks, key=lambda chunk: flat_start(record.shape, chunk.offsets)):
            begin = flat_start(record.shape, chunk.offsets)
            first, last = max(start, begin), min(stop, begin + math.prod(chunk.sizes))
            if first >= last:
                continue
            file, crc32 = self._file(chunk.file), 0
            sums = chunk.crc32 is not None and last - first == math.prod(chunk.sizes)
            if not sums:
                file.verify_checksum(chunk.entry, chunk.crc32)
            for at in range(first, last, part_numel):
                part = buffer[: min(part_numel, last - at)]
                raw = file.read_part(chunk.entry, (at - begin) * buffer.element_size(), part)
                crc32 = crc32_of(raw, crc32) if sums else 0
                yield part
            if sums:
                file.compare_crc32(chunk.entry, crc32, chunk.crc32)

    def _record(self, name: str) -> TensorRecord:
        if name not in self.index.tensors:
            raise CheckpointError(f"{self.path} holds no tensor named {name!r}")
        return self.index.tensors[name]

    def _file(self, name: str) -> TensorFile:
        return self.files.get(name)


def _index_identity(path: Path) -> tuple[int, int] | None:
    """Return the modification time and the size of a checkpoint's index file; None if there is none.

    The inode number is left out, because it may change on a network disk.
    """
    try:
        found = (path / INDEX_FILE).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def missing_names(stored: StoredCheckpoint, names: Iterable[str]) -> list[str]:
    """Return those of `names` that the checkpoint does not hold."""
    return [name for name in names if name not in stored]


def read_full(
    directory: str | os.PathLike[str], tag: str | None = None, names: Iterable[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full CPU tensor) for each of `names`, or for all tensors if it is None.

    Needs no process group. Memory: one full tensor at a time, if the caller drops each before taking the next.

    Args:
        tag: tag of the checkpoint; None: the tag in `latest`.

    Raises:
        CheckpointError: no such checkpoint or name, or a damaged file.
    """
    stored = StoredCheckpoint(directory, tag)
    requested = stored.names() if names is None else list(names)
    if unknown := missing_names(stored, requested):
        raise CheckpointError(f"{stored.path} holds no tensor named {', '.join(map(repr, unknown[:8]))}")
    return _whole_tensors(stored, requested)


def read_plain(directory: str | os.PathLike[str], tag: str | None = None) -> dict[str, Any]:
    """Return the plain data that all ranks share, with its tensors. Raises CheckpointError as `read_full` does."""
    return StoredCheckpoint(directory, tag).plain


def _whole_tensors(stored: StoredCheckpoint, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    with stored:
        for name in names:
            yield name, stored.read_full(name)
