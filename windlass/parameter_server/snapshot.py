"""File of a parameter server's snapshot: safetensors, with plain data as JSON in its metadata. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windlass.base.atomic_file import temporary_path_beside, temporary_paths_beside
from windlass.base.errors import CheckpointError
from windlass.base.regular_file import open_regular
from windlass.storage.safetensors_header import read_safetensors_header
from windlass.storage.tensor_file import read_tensors, write_tensors

FORMAT_VERSION = 3
_DATA = "windlass_parameter_server"


def write_snapshot(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path` by one rename, after its bytes are on the disk.

    Args:
        content: dictionaries, lists, tuples, texts, numbers, None and tensors.

    Raises:
        CheckpointError: `content` has a value of another type.
        OSError: the file cannot be written; `path` is unchanged.
    """
    data, tensors = encode_content(content)
    remove_unfinished(path)
    new = temporary_path_beside(path)
    try:
        write_tensors(new, tensors, {_DATA: data}, durable=True)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def remove_unfinished(path: Path) -> None:
    """Remove the temporary files of snapshots at `path` whose processes were killed.

    Without its temporary file, a process that was suspended and replaced cannot overwrite a newer snapshot.
    """
    for left in temporary_paths_beside(path):
        left.unlink(missing_ok=True)


def read_snapshot(path: Path) -> dict[str, Any]:
    """Return the content of a file of `write_snapshot`.

    Raises:
        CheckpointError: the file has another format version.
        StorageError: the file is damaged, or not a safetensors file.
        KeyError: the file is not a snapshot.
    """
    tensors, metadata = read_tensors(path)
    return decode_content(metadata[_DATA], tensors)


def read_data(path: Path) -> dict[str, Any]:
    """Return the content of a file of `write_snapshot`, with None for each tensor: only the header of the file is read.

    Raises:
        CheckpointError: the file has another format version.
        SafetensorsHeaderError: the file is damaged.
        KeyError: the file is not a snapshot.
    """
    with open_regular(path) as file:
        header = read_safetensors_header(file)
    return decode_content(header.metadata[_DATA], dict.fromkeys(header.entries))


def encode_content(content: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """Return `content` as JSON text, and its tensors by their names in the text.

    Raises:
        CheckpointError: `content` has a value of a type that `write_snapshot` does not list.
    """
    tensors: dict[str, Tensor] = {}
    return json.dumps({"format_version": FORMAT_VERSION, "content": _encode(content, "", tensors)}), tensors


def decode_content(data: str, tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Return the content that `encode_content` encoded.

    Raises:
        CheckpointError: the content is of another version.
    """
    found = json.loads(data)
    if found["format_version"] != FORMAT_VERSION:
        raise CheckpointError(f"it has format {found['format_version']!r}, not {FORMAT_VERSION}")
    content: dict[str, Any] = _decode(found["content"], tensors)
    return content


def plain_number(value: Any) -> Any:
    """Convert a numpy number, e.g. a learning rate from `np.logspace`, to Python's; return other values unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def _encode(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    value = plain_number(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        if value.layout == torch.sparse_coo:  # SGD's momentum of sparse gradients
            value = value.coalesce()
            parts = [value.indices(), value.values(), list(value.shape)]
            return {"sparse": [_encode(one, place, tensors) for one in parts]}
        name = f"tensor.{len(tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_encode(one, f"{place}[{n}]", tensors) for n, one in enumerate(value)]}
    if isinstance(value, dict) and all(type(key) in (int, str) for key in value):
        return {"dict": [[key, _encode(one, f"{place}[{key!r}]", tensors)] for key, one in value.items()]}
    raise CheckpointError(
        f"parameter server: a snapshot cannot hold state{place}, of type {type(value).__name__}; use an optimizer "
        "whose state is tensors, numbers and texts, or set no `snapshot` and start no replicas"
    )


def _decode(value: Any, tensors: Mapping[str, Tensor | None]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    return _READERS[kind](inner, tensors)


def _sparse(indices: Tensor | None, values: Tensor | None, shape: list[int]) -> Tensor | None:
    """Return the sparse tensor, or None if only the header of the file is read."""
    if indices is None or values is None:
        return None
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True).coalesce()


_READERS: dict[str, Callable[[Any, Mapping[str, Tensor | None]], Any]] = {
    "tensor": lambda inner, tensors: tensors[inner],
    "sparse": lambda inner, tensors: _sparse(*(_decode(one, tensors) for one in inner)),
    "list": lambda inner, tensors: [_decode(one, tensors) for one in inner],
    "tuple": lambda inner, tensors: tuple(_decode(one, tensors) for one in inner),
    "dict": lambda inner, tensors: {key: _decode(one, tensors) for key, one in inner},
}
