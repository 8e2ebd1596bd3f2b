"""`checkpoint.json`: which file holds which box of which tensor, and the plain data."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from windlass.base.errors import CheckpointError
from windlass.checkpoint.directory import METADATA
from windlass.checkpoint.fragment import flat_start, is_contiguous

FORMAT = "windlass-checkpoint"
FORMAT_VERSION = 1

# A plain name in the checkpoint's own directory: an index that somebody planted cannot lead to another file.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*\.safetensors$")]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Chunk(_Record):
    """One box of a tensor: where it lies in the tensor, which entry of which file holds it, the crc32 of its bytes.

    In an index that others' files stand for, `crc32` is None and `file` may have any name of the directory's own.
    """

    offsets: tuple[NonNegativeInt, ...]
    sizes: tuple[NonNegativeInt, ...]
    file: FileName
    entry: str
    crc32: NonNegativeInt | None


class TensorRecord(_Record):
    """One tensor: its whole shape, its dtype in safetensors' spelling (`F32`), its chunks."""

    shape: tuple[NonNegativeInt, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


class Index(_Record):
    """All that `checkpoint.json` says.

    `plain` and `ranks` (one item a rank) are plain data as `windlass.checkpoint.plain` encodes it; `files` maps the
    names of the data files to their sizes in bytes.
    """

    format: str
    format_version: int
    world_size: int = Field(ge=1)
    files: dict[FileName, NonNegativeInt]
    tensors: dict[str, TensorRecord]
    plain: Any
    ranks: tuple[Any, ...]


def to_text(index: Index) -> str:
    """The JSON text of `index`, one line a tensor, with a crc32 of itself at the end."""
    tensors = ",\n".join(f" {_dumps(name)}: {_dumps(one.model_dump())}" for name, one in index.tensors.items())
    fields = [name for name in Index.model_fields if name != "tensors"]  # which are plain data already
    head = ",\n".join(f"{_dumps(name)}: {_dumps(getattr(index, name))}" for name in fields)
    body = f'{{{head},\n"tensors": {{\n{tensors}\n}}'
    return f'{body},\n"crc32": "{_crc(body)}"}}\n'


def read_index(checkpoint: Path) -> Index:
    """Reads and checks the index of the checkpoint directory `checkpoint`, and the sizes of its files.

    Raises:
        CheckpointError: it is missing, damaged, of another format or version, or a data file is missing or cut short.
    """
    path = checkpoint / METADATA
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; load another checkpoint") from error
    index = parse(text, path)
    for name, size in index.files.items():
        _check_file(checkpoint / name, size)
    return index


def parse(text: str, path: Path) -> Index:
    """The index that `text`, the content of `path`, says.

    Raises:
        CheckpointError: the text is not an undamaged index of this format version.
    """
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: not JSON ({error}); load another checkpoint") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a windlass checkpoint: its 'format' is not {FORMAT!r}")
    if fields.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version {fields.get('format_version')!r}, this windlass reads {FORMAT_VERSION}; "
            "load it with the windlass that wrote it, or a newer one"
        )
    body = text.rpartition(',\n"crc32": ')[0]
    if fields.get("crc32") != _crc(body):
        raise CheckpointError(f"{path} is damaged: its crc32 does not match its text; load another checkpoint")
    try:
        index = Index.model_validate(fields)
    except ValidationError as error:
        raise CheckpointError(f"{path} is not a valid index: {error}") from error
    _check_chunks(index, path)
    return index


def _check_chunks(index: Index, path: Path) -> None:
    if len(index.ranks) != index.world_size:
        raise CheckpointError(f"{path}: world_size is {index.world_size}, but 'ranks' has {len(index.ranks)} items")
    for name, record in index.tensors.items():
        for chunk in record.chunks:
            fits = len(chunk.offsets) == len(chunk.sizes) == len(record.shape) and all(
                offset + size <= whole
                for offset, size, whole in zip(chunk.offsets, chunk.sizes, record.shape, strict=True)
            )
            if not fits or chunk.file not in index.files:
                raise CheckpointError(
                    f"{path}: a chunk of tensor {name!r} (offsets {chunk.offsets}, sizes {chunk.sizes}, file "
                    f"{chunk.file}) does not lie in its shape {record.shape}, or its file is not listed"
                )
        covered = sum(math.prod(chunk.sizes) for chunk in record.chunks)
        if covered != math.prod(record.shape):
            raise CheckpointError(
                f"{path}: the chunks of tensor {name!r} hold {covered} elements, its shape {record.shape} has "
                f"{math.prod(record.shape)}"
            )
        if all(is_contiguous(record.shape, chunk.sizes) for chunk in record.chunks):
            _check_order(name, record, path)


def _check_order(name: str, record: TensorRecord, path: Path) -> None:
    """Chunks that are flat ranges must follow each other: of as many elements as there are, none twice is none left
    out."""
    position = 0
    for chunk in sorted(record.chunks, key=lambda chunk: flat_start(record.shape, chunk.offsets)):
        size = math.prod(chunk.sizes)
        if size and flat_start(record.shape, chunk.offsets) != position:
            raise CheckpointError(
                f"{path}: the chunks of tensor {name!r} overlap or leave out elements from element {position} on"
            )
        position += size


def _check_file(path: Path, size: int) -> None:
    try:
        actual = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"the checkpoint file {path} is missing ({error.strerror}); load another one") from error
    if actual != size:
        raise CheckpointError(
            f"the checkpoint file {path} has {actual} bytes, {size} were written: it was cut short or changed; restore "
            "it or load another checkpoint"
        )


def _dumps(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _crc(body: str) -> str:
    return f"{zlib.crc32(body.encode()):08x}"
