"""Whole tensors of a checkpoint, one after the other, in one process: for exports."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint import plain
from windlass.checkpoint.directory import find
from windlass.checkpoint.fragment import flat_start, is_contiguous
from windlass.checkpoint.index import Index, TensorRecord, read_index
from windlass.checkpoint.state import RESERVED
from windlass.checkpoint.tensor_file import TensorFile, dtype_of


def read_full(
    directory: str | os.PathLike[str], tag: str | None = None, names: Iterable[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, whole CPU tensor) for each of `names`, all where None. No process group, no collective.

    Memory: one whole tensor at a time; a caller who drops each before it takes the next needs no more.

    Args:
        tag: None for the one that `latest` names.

    Raises:
        CheckpointError: no such checkpoint or name, or a damaged file.
    """
    _, path = find(directory, tag)
    index = read_index(path)
    wanted = [name for name in index.tensors if not name.startswith(RESERVED)] if names is None else list(names)
    unknown = [name for name in wanted if name not in index.tensors]
    if unknown:
        raise CheckpointError(f"{path} holds no tensor named {', '.join(map(repr, unknown[:8]))}")
    return _whole_tensors(path, index, wanted)


def read_plain(directory: str | os.PathLike[str], tag: str | None = None) -> dict[str, Any]:
    """The plain data that all ranks share, with the tensors in it. Raises CheckpointError as `read_full` does."""
    return read_outline(directory, tag)[0]


def read_outline(
    directory: str | os.PathLike[str], tag: str | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The plain data, and every named tensor as one without memory (on the device `meta`) that has its shape and
    dtype. Raises CheckpointError as `read_full` does."""
    _, path = find(directory, tag)
    index = read_index(path)
    tensors = dict(_whole_tensors(path, index, plain.tensor_names(index.plain)))
    decoded: dict[str, Any] = plain.decode(index.plain, tensors)
    described = {
        name: torch.empty(record.shape, dtype=dtype_of(record.dtype), device="meta")
        for name, record in index.tensors.items()
        if not name.startswith(RESERVED)
    }
    return decoded, described


def _whole_tensors(path: Path, index: Index, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    with ExitStack() as stack:
        files: dict[str, TensorFile] = {}
        for name in names:
            record = index.tensors[name]
            for chunk in record.chunks:
                if chunk.file not in files:
                    files[chunk.file] = stack.enter_context(TensorFile(path / chunk.file))
            yield name, _whole(record, files)


def _whole(record: TensorRecord, files: dict[str, TensorFile]) -> torch.Tensor:
    whole = torch.empty(record.shape, dtype=dtype_of(record.dtype))
    flat = whole.view(-1)
    for chunk in record.chunks:
        if is_contiguous(record.shape, chunk.sizes):
            start = flat_start(record.shape, chunk.offsets)
            part = flat[start : start + torch.Size(chunk.sizes).numel()]
            files[chunk.file].read_into(chunk.entry, part, chunk.crc32)
        else:
            box = torch.empty(chunk.sizes, dtype=whole.dtype)
            files[chunk.file].read_into(chunk.entry, box, chunk.crc32)
            corner = zip(chunk.offsets, chunk.sizes, strict=True)
            whole[tuple(slice(offset, offset + size) for offset, size in corner)] = box
    return whole
