"""The tensors of safetensors files as promises, read in spans with `pread`, so that each rank reads only its own bytes.

Format: https://github.com/huggingface/safetensors (8 bytes of length, a JSON header, then the tensors).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.zero.born_deferred import Deferred, promise

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LONGEST_HEADER = 100_000_000  # safetensors' own limit: a damaged length must not ask for all memory
_REMEDY = "fetch or save the model again"


@dataclass(frozen=True)
class FileSpan:
    """The bytes of one tensor in a file: from `begin` on, row-major."""

    path: Path
    name: str
    begin: int
    dtype: torch.dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements `[start, stop)`, flat.

        Raises:
            CheckpointError: the file ends before, or cannot be read.
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
            raise CheckpointError(f"tensor {self.name!r} of {self.path} cannot be read: {error.strerror}") from error
        return flat


def promises(files: Iterable[Path], *, computes: bool) -> dict[str, Deferred]:
    """Every tensor of these files by name; a later file goes before an earlier one.

    Args:
        files: safetensors files.
        computes: this rank is the one that computes with whole tensors.

    Raises:
        CheckpointError: a file is missing, cut short, or no safetensors file. Nothing was read then but headers.
    """
    found: dict[str, Deferred] = {}
    for path in files:
        for name, (shape, source) in header(path).items():
            found[name] = promise(shape, source.dtype, source, computes=computes)
    return found


def header(path: Path) -> dict[str, tuple[tuple[int, ...], FileSpan]]:
    """Shapes and places of the tensors of one file. Raises CheckpointError as `promises` does."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= _LONGEST_HEADER else b""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {_REMEDY}") from error
    try:
        entries = json.loads(text) if len(text) == length else None
    except ValueError:
        entries = None
    if not isinstance(entries, dict) or not entries:
        raise CheckpointError(f"{path} is cut short or no safetensors file; {_REMEDY}")
    entries.pop("__metadata__", None)
    return {name: _entry(path, name, entry, 8 + length, size) for name, entry in entries.items()}


def _entry(path: Path, name: str, entry: Any, data: int, size: int) -> tuple[tuple[int, ...], FileSpan]:
    try:
        code, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has a damaged entry for {name!r}: {entry!r}; {_REMEDY}") from error
    if code not in _DTYPES:
        raise CheckpointError(f"tensor {name!r} of {path} has dtype {code!r}, which cannot be read in spans")
    dtype = _DTYPES[code]
    if min(begin, *shape, 0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{path} is damaged: {name!r} of shape {shape} has {end - begin} bytes; {_REMEDY}")
    if data + end > size:
        raise CheckpointError(
            f"{path} is cut short: it has {size} bytes, and tensor {name!r} ends at {data + end}; {_REMEDY}"
        )
    return shape, FileSpan(path, name, data + begin, dtype)
