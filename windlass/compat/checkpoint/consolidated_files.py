"""Writing of a checkpoint's weights as files for `from_pretrained` and `torch.load`, a part of a tensor at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from windlass.base.atomic_file import make_directory, temporary_path_beside
from windlass.base.dtypes import is_castable
from windlass.checkpoint.checkpoint_directory import disk_errors, require_space
from windlass.checkpoint.pickle_writer import PlannedTensor
from windlass.checkpoint.safetensors_file import TensorEntry
from windlass.checkpoint.stored_checkpoint import StoredCheckpoint
from windlass.checkpoint.streamed_safetensors import stream_tensors
from windlass.checkpoint.torch_file_writer import write_torch_file

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class StoredWeight:
    """Stored parameter or buffer to convert.

    Attributes:
        name: name in the model; for a tied parameter the first of its names.
        dtype: dtype of the tensor that `read_full` returns.
        shape: shape of the full tensor.
        stored: checkpoint with the tensor.
        stored_name: name of the tensor in `stored`.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: StoredCheckpoint
    stored_name: str

    def read_full(self) -> torch.Tensor:
        """Return the full tensor on the CPU."""
        with self.stored:
            return self.stored.read_full(self.stored_name).to(self.dtype)

    def dtype_as(self, dtype: torch.dtype) -> torch.dtype:
        """Return `dtype` for a floating-point tensor of at least 16 bits, else the tensor's own dtype."""
        return dtype if is_castable(self.dtype) else self.dtype


def parse_output_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the dtype for a dtype or its name. Raises ValueError unless it is float32, float16 or bfloat16."""
    found = _DTYPES.get(dtype.removeprefix("torch.").lower()) if isinstance(dtype, str) else dtype
    if found not in _DTYPES.values():
        raise ValueError(f"Unsupported output dtype {dtype!r}; give one of {', '.join(sorted(_DTYPES))}")
    assert found is not None
    return found


def parse_shard_size(size: str | int | None) -> int | None:
    """Return the number of bytes for a size such as "5GB" (10^9) or "2GiB" (2^30). Return an int or None unchanged.

    Raises ValueError for other text.
    """
    if size is None or isinstance(size, int):
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise ValueError(f"max_shard_size {size!r} is not a size; write one such as 5GB, 500MB or 2GiB")
    return int(float(found[1]) * unit)


def write_weights(
    target: Path,
    weights: Mapping[str, StoredWeight],
    dtype: torch.dtype,
    max_shard_bytes: int | None,
    *,
    safetensors: bool,
) -> None:
    """Write the weights to the directory `target`. Each file appears atomically; if there are several, an index last.

    Args:
        weights: weights by name; a tied weight is under each of its names.
        dtype: dtype of all floating-point tensors.
        max_shard_bytes: maximum bytes of a file with more than one tensor; None: one file for all tensors.
    """
    stem, suffix = ("model", "safetensors") if safetensors else ("pytorch_model", "bin")
    shards = _split_into_files(weights, dtype, max_shard_bytes)
    total = sum(_nbytes(weight, dtype) for name, weight in weights.items() if weight.name == name)
    with disk_errors(target, total):
        make_directory(target)
    require_space(target, total)
    count = len(shards)
    names = [f"{stem}-{n:05d}-of-{count:05d}.{suffix}" for n in range(1, count + 1)]
    names = names if count > 1 else [f"{stem}.{suffix}"]
    write = _write_safetensors if safetensors else _write_torch
    for file_name, shard in zip(names, shards, strict=True):
        _write_atomically(target / file_name, lambda path, shard=shard: write(path, shard, dtype))  # type: ignore[misc]
    if count > 1:
        of = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": of}, indent=2, sort_keys=True) + "\n"
        _write_atomically(target / f"{stem}.{suffix}.index.json", lambda path: path.write_text(text, encoding="utf-8"))


def _write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a temporary name, and rename it once it is complete."""
    temporary = temporary_path_beside(path)
    try:
        write(temporary)
        with disk_errors(path, 0):
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_safetensors(path: Path, shard: Mapping[str, StoredWeight], dtype: torch.dtype) -> None:
    once = {name: weight for name, weight in shard.items() if weight.name == name}
    entries = {name: TensorEntry(weight.dtype_as(dtype), weight.shape) for name, weight in once.items()}
    # put wide dtypes first, so that each tensor is aligned
    entries = dict(sorted(entries.items(), key=lambda item: -item[1].dtype.itemsize))
    tied = {name: weight.name for name, weight in shard.items() if weight.name != name}
    stream_tensors(path, entries, (_iter_parts(once[name]) for name in entries), tied)


def _write_torch(path: Path, shard: Mapping[str, StoredWeight], dtype: torch.dtype) -> None:
    planned = {
        weight.name: PlannedTensor(weight.dtype_as(dtype), weight.shape, lambda weight=weight: _iter_parts(weight))  # type: ignore[misc]
        for weight in shard.values()
    }
    write_torch_file(path, {name: planned[weight.name] for name, weight in shard.items()})


def _iter_parts(weight: StoredWeight) -> Iterator[torch.Tensor]:
    with weight.stored:
        for part in weight.stored.iter_parts(weight.stored_name):
            # round to this dtype first, as `read_full` does; the writer then casts to the dtype of the file
            yield part.to(weight.dtype)


def _nbytes(weight: StoredWeight, dtype: torch.dtype) -> int:
    return TensorEntry(weight.dtype_as(dtype), weight.shape).nbytes


def _split_into_files(
    weights: Mapping[str, StoredWeight], dtype: torch.dtype, max_shard_bytes: int | None
) -> list[dict[str, StoredWeight]]:
    """Group consecutive tensors into files of at most `max_shard_bytes` bytes, at least one tensor each.

    Further names of a tied tensor are in the same file as the tensor.
    """
    shards: list[dict[str, StoredWeight]] = [{}]
    size, place = 0, dict[str, int]()
    for name, weight in weights.items():
        if weight.name in place:
            shards[place[weight.name]][name] = weight
            continue
        nbytes = _nbytes(weight, dtype)
        if max_shard_bytes is not None and shards[-1] and size + nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = weight
        place[weight.name] = len(shards) - 1
        size += nbytes
    return shards
