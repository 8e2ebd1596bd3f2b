"""Small safetensors files, written and read in full: for files of windlass that are not checkpoints."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from windlass.base.atomic_file import open_new
from windlass.base.errors import StorageError
from windlass.base.regular_file import open_regular
from windlass.storage.safetensors_header import (
    CODES,
    DTYPES,
    SafetensorsHeaderError,
    encode_safetensors_header,
    read_safetensors_header,
)


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None, *, durable: bool = False
) -> None:
    """Write a new file.

    Args:
        durable: return after the bytes are on the disk.

    Raises:
        StorageError: safetensors has no name for the dtype of a tensor.
        OSError: the file exists or cannot be written.
    """
    here = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    for name, tensor in here.items():
        if tensor.dtype not in CODES:
            raise StorageError(f"{path}: tensor {name!r} has dtype {tensor.dtype}; use one of {list(CODES)}")
    header = encode_safetensors_header(
        {name: (one.dtype, tuple(one.shape)) for name, one in here.items()}, metadata or {}
    )
    with open_new(path) as file:
        file.write(header)
        for tensor in here.values():
            file.write(_memory(tensor))
        if durable:
            file.flush()
            os.fsync(file.fileno())


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a file, on the CPU, and its metadata.

    Raises:
        StorageError: the file is damaged, or not a safetensors file.
        OSError: the file cannot be read, or is not a regular file.
    """
    found = {}
    with open_regular(path) as file:
        try:
            header = read_safetensors_header(file)
        except SafetensorsHeaderError as error:
            raise StorageError(f"{path} is damaged or not a safetensors file: {error}; write it again") from error
        for name, entry in header.entries.items():
            if entry.dtype not in DTYPES:
                raise StorageError(
                    f"{path}: tensor {name!r} has the unknown dtype {entry.dtype!r}; write the file again"
                )
            found[name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="cpu")
            file.seek(header.data_offset + entry.begin)
            if file.readinto(_memory(found[name])) != entry.end - entry.begin:
                raise StorageError(f"{path} is damaged: it ends within tensor {name!r}; write it again")
    return found, header.metadata


def _memory(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_ubyte]:
    """Return the memory of a contiguous CPU tensor, which the caller keeps alive."""
    return (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr() or 1)
