"""Deferred tensors of safetensors files. A rank reads only the elements that it needs, with `preadv`.

Format: https://github.com/huggingface/safetensors (8 bytes of length, a JSON header, then the tensors).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from windlass.base.errors import CheckpointError
from windlass.base.log import logger
from windlass.base.regular_file import open_regular
from windlass.storage.safetensors_header import (
    DTYPES,
    SafetensorsEntry,
    SafetensorsHeaderError,
    read_safetensors_header,
)
from windlass.zero.sharded_init.deferred import DeferredTensor, deferred_tensor

_REMEDY = "fetch or save the model again"


@dataclass(frozen=True)
class FileSpan:
    """Bytes of one tensor in a file, from byte `begin`, row-major."""

    path: Path
    name: str
    begin: int
    dtype: torch.dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements `[start, stop)`, flat.

        Raises:
            CheckpointError: the file is too short or cannot be read.
        """
        flat = torch.empty(stop - start, dtype=self.dtype)
        if not flat.numel():
            return flat
        raw = flat.view(torch.uint8).numpy().data
        position = self.begin + start * self.dtype.itemsize
        try:
            descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            try:
                while raw:
                    count = os.preadv(descriptor, [raw[: 1 << 30]], position)
                    if count == 0:
                        raise CheckpointError(f"{self.path} ends inside tensor {self.name!r}; {_REMEDY}")
                    raw, position = raw[count:], position + count
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CheckpointError(
                f"tensor {self.name!r} of {self.path} cannot be read: {error.strerror}; {_REMEDY}"
            ) from error
        return flat


def deferred_from_files(files: Iterable[Path], *, computes: bool) -> dict[str, DeferredTensor]:
    """Return a deferred tensor for each tensor in `files`, by name. Reads only the headers of the files.

    Args:
        files: safetensors files. If several have a tensor of the same name, the last one is used.
        computes: True on rank 0, where operations on deferred tensors use the full values.

    Raises:
        CheckpointError: see `header`.
    """
    tensors: dict[str, DeferredTensor] = {}
    _log_unchecked()
    for path in files:
        for name, (shape, source) in header(path).items():
            tensors[name] = deferred_tensor(shape, source.dtype, source, computes=computes)
    return tensors


@cache
def _log_unchecked() -> None:
    """Log that safetensors files have no checksums, once per process."""
    logger.info("weights are read from safetensors files, which carry no checksums: damage in them is not detected")


def header(path: Path) -> dict[str, tuple[tuple[int, ...], FileSpan]]:
    """Return the shape and span of each tensor in one file, by name.

    Raises:
        CheckpointError: the file is missing, truncated, not a safetensors file, or without tensors; or a tensor has an
            unsupported dtype.
    """
    try:
        with open_regular(path) as file:
            found = read_safetensors_header(file)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}; {_REMEDY}") from error
    except SafetensorsHeaderError as error:
        raise CheckpointError(f"{path} is truncated, damaged or not a safetensors file: {error}; {_REMEDY}") from error
    if not found.entries:
        raise CheckpointError(f"{path} holds no tensors; {_REMEDY}")
    return {name: _place(path, name, entry, found.data_offset) for name, entry in found.entries.items()}


def _place(path: Path, name: str, entry: SafetensorsEntry, data: int) -> tuple[tuple[int, ...], FileSpan]:
    if entry.dtype not in DTYPES:
        raise CheckpointError(
            f"tensor {name!r} of {path} has dtype {entry.dtype!r}, which windlass cannot read; save it in another dtype"
        )
    return entry.shape, FileSpan(path, name, data + entry.begin, DTYPES[entry.dtype])
