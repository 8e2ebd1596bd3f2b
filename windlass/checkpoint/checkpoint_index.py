"""Index of a checkpoint, `checkpoint.json`: the file of each rectangular part (box) of each tensor, and plain data."""

from __future__ import annotations

import json
import math
import secrets
import stat
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from windlass.base.errors import CheckpointError
from windlass.base.regular_file import read_regular, resolve_within
from windlass.checkpoint import plain_data
from windlass.checkpoint.checkpoint_directory import INDEX_FILE
from windlass.checkpoint.checkpoint_state import RESERVED_PREFIXES
from windlass.checkpoint.fragment_boxes import flat_start, is_contiguous
from windlass.checkpoint.safetensors_file import TensorFile, dtype_from_code

FORMAT = "windlass-checkpoint"
FORMAT_VERSION = 1

# Accept only plain names in the checkpoint's own directory, so that a forged index cannot refer to another file.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*\.safetensors$")]
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
Crc32 = Annotated[int, Field(strict=True, ge=0, lt=1 << 32)]
_MOST_DIMS = 64


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """Rectangular part (box) of a tensor: its position, the file and entry that hold it, and the crc32 of its bytes.

    In an index built from other libraries' files, `crc32` is None if the file itself has a checksum that covers the
    entry, and `file` may be any name in the directory.
    """

    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]
    file: FileName
    entry: str
    crc32: Crc32 | None


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor: its full shape, its dtype in safetensors' spelling (`F32`), its chunks."""

    shape: tuple[Count, ...]
    dtype: str
    chunks: tuple[ChunkRecord, ...]


class CheckpointIndex(BaseModel):
    """Contents of `checkpoint.json`.

    `plain` and `ranks` (one item per rank) are plain data as `windlass.checkpoint.plain_data` encodes it; `files` maps
    the names of the data files to their sizes in bytes.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: str
    format_version: int
    world_size: Annotated[int, Field(strict=True, ge=1, lt=1 << 31)]
    files: dict[FileName, Count]
    tensors: dict[str, TensorRecord]
    plain: Any
    ranks: tuple[Any, ...]


def encode_index(index: CheckpointIndex) -> str:
    """Return the JSON text of `index`, with one line per tensor and a crc32 of the preceding text at the end."""
    tensors = ",\n".join(f" {_quoted(name)}: {_record_text(one)}" for name, one in index.tensors.items())
    fields = [name for name in CheckpointIndex.model_fields if name != "tensors"]  # values that are JSON data already
    head = ",\n".join(f"{_dumps(name)}: {_dumps(getattr(index, name))}" for name in fields)
    body = f'{{{head},\n"tensors": {{\n{tensors}\n}}'
    return f'{body},\n"crc32": "{_crc(body)}"}}\n'


_quoted = json.encoder.encode_basestring_ascii


def _record_text(record: TensorRecord) -> str:
    """Return the text that `json.dumps` gives for a record, several times faster. Records are most of an index."""
    chunks = ", ".join(
        f'{{"offsets": {list(one.offsets)}, "sizes": {list(one.sizes)}, "file": {_quoted(one.file)}, '
        f'"entry": {_quoted(one.entry)}, "crc32": {"null" if one.crc32 is None else one.crc32}}}'
        for one in record.chunks
    )
    return f'{{"shape": {list(record.shape)}, "dtype": {_quoted(record.dtype)}, "chunks": [{chunks}]}}'


def read_index(checkpoint: Path) -> CheckpointIndex:
    """Read and check the index of the checkpoint directory `checkpoint`, and check the sizes of its files.

    Raises:
        CheckpointError: the index is missing, damaged, forged, or of another format or version, or a data file is
            missing or truncated.
    """
    path = checkpoint / INDEX_FILE
    try:
        text = read_regular(path, checkpoint).decode("utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}; load another checkpoint") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; load another checkpoint") from error
    index = parse_index(text, path)
    check_files(index, checkpoint)
    return index


def parse_index(text: str, path: Path) -> CheckpointIndex:
    """Parse and check the index in `text`, the content of `path`.

    Raises:
        CheckpointError: the text is not an undamaged index of this format version, or it contradicts itself.
    """
    try:
        fields = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged: not JSON ({type(error).__name__}: {error!s:.200}); load another checkpoint"
        ) from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a windlass checkpoint: its 'format' is not {FORMAT!r}")
    if type(fields.get("format_version")) is not int or fields["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version {fields.get('format_version')!r:.100}, this windlass reads {FORMAT_VERSION}; "
            "load it with the windlass that wrote it, or a newer one"
        )
    body = text.rpartition(',\n"crc32": ')[0]
    if fields.get("crc32") != _crc(body):
        raise CheckpointError(f"{path} is damaged: its crc32 does not match its text; load another checkpoint")
    try:
        index = CheckpointIndex.model_validate(fields)
    except ValidationError as error:
        raise CheckpointError(f"{path} is not a valid index: {validation_message(error)}") from error
    for name, record in index.tensors.items():
        if any(chunk.crc32 is None for chunk in record.chunks):
            raise CheckpointError(f"{path} is not a valid index: a chunk of tensor {name!r} has no crc32")
    check_index(index, path)
    for name, record in index.tensors.items():
        # a forged index could name the entry of another tensor of the same shape and dtype
        if any(chunk.entry != entry_name(name, record.shape, (chunk.offsets, chunk.sizes)) for chunk in record.chunks):
            raise CheckpointError(
                f"{path} is not a valid index: a chunk of tensor {name!r} names the entry of another tensor"
            )
    return index


def entry_name(name: str, shape: tuple[int, ...], box: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    """Return the entry name of a box (offsets, sizes): the tensor's name, with `@` and the offsets if it is a part."""
    return name if box[1] == shape else f"{name}@{','.join(map(str, box[0]))}"


def check_index(index: CheckpointIndex, path: Path) -> None:
    """Check that an index, read or built, does not contradict itself. Opens no file.

    Raises:
        CheckpointError: a tensor's chunks do not cover it exactly once, a tensor has an unknown dtype or file or more
            than 64 dimensions, a file name leads out of the directory, `ranks` does not have `world_size` items, or
            plain data is too deep, or refers to a tensor that is missing, too large, or named twice.
    """
    if len(index.ranks) != index.world_size:
        raise CheckpointError(f"{path}: world_size is {index.world_size}, but 'ranks' has {len(index.ranks)} items")
    for name in index.files:
        if "/" in name or "\0" in name or name in ("", ".", "..") or Path(name).name != name:
            raise CheckpointError(f"{path}: the file name {name!r:.100} leads out of the checkpoint's directory")
    for name, record in index.tensors.items():
        _check_tensor(name, record, index, path)
    _check_plain(index, path)


def check_files(index: CheckpointIndex, checkpoint: Path) -> None:
    """Check that all data files exist, are regular files in the directory, and have the recorded size.

    Raises:
        CheckpointError: a file is missing, is not a regular file, or has another size.
    """
    for name, size in index.files.items():
        path = checkpoint / name
        try:
            found = resolve_within(path, checkpoint).stat()
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint file {path} is missing ({error.strerror or error}); load another one"
            ) from error
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"the checkpoint file {path} is not a regular file; load another checkpoint")
        if found.st_size != size:
            raise CheckpointError(
                f"the checkpoint file {path} has {found.st_size} bytes, {size} were written: it was truncated or "
                "changed; restore it or load another checkpoint"
            )


def check_entries(index: CheckpointIndex, files: Iterable[str], open_file: Callable[[str], TensorFile]) -> None:
    """Check that the header of each of `files` has the entries that the index expects, with dtype, shape and size.

    Args:
        open_file: opens a file of the checkpoint by its name.

    Raises:
        CheckpointError: an entry is missing, or differs from the index.
    """
    requested = set(files)
    by_file: dict[str, list[tuple[TensorRecord, ChunkRecord]]] = {}
    for record in index.tensors.values():
        for chunk in record.chunks:
            if chunk.file in requested:
                by_file.setdefault(chunk.file, []).append((record, chunk))
    for name, chunks in by_file.items():
        file = open_file(name)
        for record, chunk in chunks:
            file.check_entry(chunk.entry, dtype_from_code(record.dtype), chunk.sizes)


def _check_tensor(name: str, record: TensorRecord, index: CheckpointIndex, path: Path) -> None:
    shape = record.shape
    try:
        dtype_from_code(record.dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: tensor {name!r}: {error}") from error
    if len(shape) > _MOST_DIMS:
        raise CheckpointError(f"{path}: tensor {name!r} has {len(shape)} dimensions, at most {_MOST_DIMS} are read")
    covered, flat = 0, True
    for chunk in record.chunks:
        fits = len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
            offset + size <= full for offset, size, full in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        )
        if not fits or chunk.file not in index.files:
            raise CheckpointError(
                f"{path}: a chunk of tensor {name!r} (offsets {chunk.offsets}, sizes {chunk.sizes}, file "
                f"{chunk.file}) does not lie in its shape {shape}, or its file is not listed"
            )
        covered += math.prod(chunk.sizes)
        flat = flat and is_contiguous(shape, chunk.sizes)
    if covered != math.prod(shape):
        raise CheckpointError(
            f"{path}: the chunks of tensor {name!r} hold {covered} elements, its shape {shape} has {math.prod(shape)}"
        )
    if flat:
        _check_order(name, record, path)
    elif len(record.chunks) > 1 and not _covers_exactly_once(shape, record.chunks):
        raise CheckpointError(f"{path}: the chunks of tensor {name!r} overlap, and other elements are missing")


def _check_order(name: str, record: TensorRecord, path: Path) -> None:
    """Check that chunks that are flat ranges follow each other without gap or overlap.

    The caller has checked the number of elements, so there is no gap after the last chunk either.
    """
    position = 0
    for start, size in sorted((flat_start(record.shape, one.offsets), math.prod(one.sizes)) for one in record.chunks):
        if size and start != position:
            raise CheckpointError(
                f"{path}: the chunks of tensor {name!r} overlap, or elements are missing, from element {position} on"
            )
        position += size


# [Note: boxes that cover a tensor] A polynomial shows whether boxes of any form cover each element exactly once. The
# element (i, j, ...) is written as the term x^i y^j ...; a box is then a product of geometric sums, (x^stop - x^start)
# / (x - 1) for each dimension, and boxes cover the tensor exactly once if and only if their polynomials add up to that
# of the full tensor. Both sides are evaluated at a random point modulo a prime: two different polynomials agree there
# with a probability of less than 2^-57, and the author of a forged index does not know the point. The cost is a few
# powers per box, for any number of boxes.
_PRIME = (1 << 127) - 1
_POINT = [2 + secrets.randbelow(_PRIME - 3) for _ in range(_MOST_DIMS)]
_PER_SUM = [pow(x - 1, -1, _PRIME) for x in _POINT]


def _covers_exactly_once(shape: tuple[int, ...], chunks: Iterable[ChunkRecord]) -> bool:
    full = _geometric_sum((0,) * len(shape), shape)
    return (sum(_geometric_sum(one.offsets, one.sizes) for one in chunks) - full) % _PRIME == 0


def _geometric_sum(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    product = 1
    for x, per, start, size in zip(_POINT, _PER_SUM, offsets, sizes, strict=False):
        product = product * pow(x, start, _PRIME) * (pow(x, size, _PRIME) - 1) * per % _PRIME
    return product


def _check_plain(index: CheckpointIndex, path: Path) -> None:
    """Check that plain data is not too deep, and that its tensors are in the index, named once, and not too large."""
    try:
        plain_data.require_depth((index.plain, index.ranks))
        shared = plain_data.tensor_names(index.plain)
        named = shared + [name for own in index.ranks for name in plain_data.tensor_names(own)]
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    for name in named:
        if name not in index.tensors or not name.startswith(RESERVED_PREFIXES):
            raise CheckpointError(f"{path}: plain data refers to the tensor {name!r}, which is not in the checkpoint")
    if len(set(named)) != len(named):
        raise CheckpointError(f"{path}: plain data refers to a tensor more than once")
    taken = sum(
        math.prod(index.tensors[name].shape) * dtype_from_code(index.tensors[name].dtype).itemsize for name in named
    )
    # 16 bytes each for DeepSpeed's plain numbers, which are indexed as tensors that no file holds
    if taken > sum(index.files.values()) + len(named) * 16:
        raise CheckpointError(f"{path}: the tensors in plain data have {taken} bytes, more than all of the files")


def validation_message(error: ValidationError) -> str:
    """Describe the first validation errors without the rejected values, which may be long."""
    found = [f"{'.'.join(map(str, one['loc']))[:200]}: {one['msg']}" for one in error.errors(include_url=False)[:4]]
    return "; ".join(found) + (f"; and {error.error_count() - 4} more" if error.error_count() > 4 else "")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"the number {name}")


def _dumps(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _crc(body: str) -> str:
    return f"{zlib.crc32(body.encode('utf-8', 'surrogatepass')):08x}"
