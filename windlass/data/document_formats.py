"""Readers of documents from files of each format."""

from __future__ import annotations

import gzip
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from windlass.base.bounded_json import JsonError, parse_json
from windlass.base.errors import DataError

_FORMAT_BY_SUFFIX = {".jsonl": "lines", ".ndjson": "lines", ".json": "json", ".parquet": "parquet"}
KNOWN_SUFFIXES = tuple(_FORMAT_BY_SUFFIX)
_PIECE_BYTES = 2**20
# Errors of an unreadable file. EOFError and zlib.error are those of a truncated or damaged .gz file.
READ_ERRORS = (OSError, EOFError, zlib.error)


def detect_format(path: Path) -> str:
    """Return `lines`, `json`, `parquet` or `text` by the suffix. A trailing `.gz` is ignored."""
    name = path.name.lower().removesuffix(".gz")
    return _FORMAT_BY_SUFFIX.get(Path(name).suffix, "text")


def is_text(path: Path) -> bool:
    """Return True if the first 8 KiB are UTF-8 without a zero byte, or the file is unreadable (the reader then
    reports the error).
    """
    try:
        with _open(str(path)) as stream:
            head = stream.read(8192)
    except READ_ERRORS:
        return True
    if b"\0" in head:
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.start >= len(head) - 3 and len(head) == 8192  # a character that the end of the window truncates
    return True


def has_records(path: Path, field: str) -> bool:
    """Return True if a `.json` file is an array or JSON lines, False if it is one object over several lines.

    A file of one object on one line is a record if the object has `field`; otherwise it holds settings.
    """
    try:
        with _open(str(path)) as stream:
            lines = (line for line in stream if line.strip())
            first = next(lines, b"")
            is_only = next(lines, None) is None
    except READ_ERRORS:
        return True  # the reader reports the error
    if first.lstrip().startswith(b"["):
        return True
    try:
        record = parse_json(first)
    except JsonError:
        return False
    return isinstance(record, str) or isinstance(record, dict) and (field in record or not is_only)


def read_text(location: str) -> Iterator[str]:
    """Yield the file as one document, or above 1 MiB in pieces of whole lines, so that any size fits in memory."""
    with _open(location) as stream:
        while lines := stream.readlines(_PIECE_BYTES):
            yield _decode(b"".join(lines), location)


def read_lines(location: str, field: str) -> Iterator[str]:
    """Yield one document per line: the text of `field` in a JSON object, or a JSON string."""
    with _open(location) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                where = f"{location}, line {number}"
                yield _record_text(_parse(_decode(line, where), where), field, where)


def read_json(location: str, field: str) -> Iterator[str]:
    """Yield the documents of a JSON array of objects or strings, or of JSON lines in a `.json` file."""
    with _open(location) as stream:
        start = stream.read(64).lstrip()[:1]
    if start != b"[":
        yield from read_lines(location, field)
        return
    with _open(location) as stream:
        records = _parse(_decode(stream.read(), location), location)
    for index, record in enumerate(records):
        where = f"{location}, element {index}"
        yield _record_text(record, field, where)


def read_parquet(location: str, field: str) -> Iterator[str]:
    """Yield the string column `field`, row by row, without nulls.

    Raises:
        DataError: pyarrow is not installed, the file is not Parquet, or it has no such column of strings.
    """
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(f"reading {location} needs pyarrow: pip install 'windlass[hf]'") from error
    try:
        with parquet.ParquetFile(location) as file:
            schema = file.schema_arrow
            if field not in schema.names:
                raise DataError(_missing_field_text(field, schema.names, location))
            if not _is_string_type(schema.field(field).type):
                raise DataError(
                    f"{location}: the column {field!r} holds {schema.field(field).type}, not strings; name another one "
                    "with --text-field"
                )
            for batch in file.iter_batches(columns=[field]):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{location} is not a readable Parquet file ({error})") from error


def _is_string_type(kind: Any) -> bool:
    from pyarrow import types

    inner = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(inner) or types.is_large_string(inner) or types.is_null(inner))


def read_hub(location: str, field: str) -> Iterator[str]:
    """Yield the column `field` of a Hugging Face dataset `NAME[@CONFIG][:SPLIT]` as strings, without nulls.

    Raises:
        DataError: the package datasets is not installed, the dataset cannot be loaded, or it has no such column.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"reading hub:{location} needs datasets: pip install 'windlass[hf]'") from error
    # The client logs every attempt; one error below is enough.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    name, _, split = location.partition(":")
    name, _, config = name.partition("@")
    try:
        dataset = datasets.load_dataset(name, config or None, split=split or "train", trust_remote_code=False)
    except Exception as error:  # the library raises errors of its file systems and HTTP clients
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"cannot load hub:{location}: {reason}; check the name, the split and the network") from error
    if field not in dataset.column_names:
        raise DataError(_missing_field_text(field, dataset.column_names, f"hub:{location}"))
    for row in dataset.select_columns([field]):
        if row[field] is not None:
            yield str(row[field])


def _open(location: str) -> IO[bytes]:
    if location.lower().endswith(".gz"):
        return cast(IO[bytes], gzip.open(location, "rb"))
    return open(location, "rb")


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 (byte {error.start} is {data[error.start]:#04x}); convert it first"
        ) from error


def _parse(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except JsonError as error:
        raise DataError(f"{where} is not JSON ({error}); one object a line is read") from error


def _record_text(record: Any, field: str, where: str) -> str:
    if isinstance(record, str):
        return _check_surrogates(record, where)
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        fields = list(record) if isinstance(record, dict) else []
        raise DataError(_missing_field_text(field, fields, where))
    return _check_surrogates(str(record[field]), where)


def _check_surrogates(text: str, where: str) -> str:
    """Return the text. Raise DataError if an escape left half a surrogate pair in it, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} has half a surrogate pair, {text[error.start]!r} at character {error.start}; it was truncated "
            "inside a character; drop that record"
        ) from error
    return text


def _missing_field_text(field: str, fields: list[str], where: str) -> str:
    offered = ", ".join(map(repr, fields[:12])) or "none"
    return f"{where} has no text field {field!r} (fields: {offered}); name the right one with --text-field"
