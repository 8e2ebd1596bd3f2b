"""Token file: a packed corpus in one file that every rank maps, with a checked JSON header.

Layout: a header of 4,096 bytes (8 bytes of magic, JSON with a hash of its own fields, and spaces); the training tokens;
the held-out tokens. Tokens are little-endian uint16, or uint32 for a vocabulary above 65,536.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from windlass.base.atomic_file import open_new, temporary_path_beside
from windlass.base.bounded_json import parse_json
from windlass.base.errors import DataError

FORMAT_VERSION = 2
_MAGIC = b"WLTOKENS"
_HEADER_BYTES = 4096
_READ_BYTES = 2**22


@dataclass(frozen=True)
class TokenFileHeader:
    """Contents and origin of a token file."""

    vocab_size: int
    eos: int
    train_tokens: int
    eval_tokens: int  # the first is an end token that is never predicted
    train_bytes: int  # UTF-8 bytes of the training documents
    eval_bytes: int
    documents: int
    key: str  # hash of the documents, the tokenizer and the split
    digest: str  # hash of the tokens
    format_version: int = FORMAT_VERSION

    @property
    def checksum(self) -> str:
        """Hash of all fields, since damage in the header could change a score undetected."""
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def dtype(self) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
        return token_dtype(self.vocab_size)


@dataclass(frozen=True)
class TokenFile:
    """Opened token file. Its arrays are mapped, so that ranks of one host share the pages."""

    path: Path
    header: TokenFileHeader
    train: np.ndarray  # [train_tokens]
    held_out: np.ndarray  # [eval_tokens]


def token_dtype(vocab_size: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """Return the narrower of uint16 and uint32 that holds every id."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


class TokenWriter:
    """Writer of a token file under a temporary name, which `finish` renames.

    It is a context manager, which removes an unfinished file.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._path = path
        self._partial = temporary_path_beside(path)
        self._dtype = token_dtype(vocab_size)
        self._vocab_size = vocab_size
        self._digest = hashlib.blake2b(digest_size=16)
        self._stream: IO[bytes] = open_new(self._partial, "wb")  # closed in __exit__
        self._stream.write(b" " * _HEADER_BYTES)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._stream.close()  # close also fails on a full disk
        finally:
            self._partial.unlink(missing_ok=True)

    def append(self, tokens: np.ndarray) -> None:
        """Append ids from 0 to the vocabulary size - 1.

        Raises:
            DataError: an id is outside this range.
        """
        for token in (int(tokens.min()), int(tokens.max())) if tokens.size else ():
            if not 0 <= token < self._vocab_size:
                raise DataError(
                    f"token id {token} is outside the vocabulary of {self._vocab_size}; "
                    "the tokenizer's files disagree with each other"
                )
        data = tokens.astype(self._dtype).tobytes()
        self._digest.update(data)
        self._stream.write(data)

    def finish(
        self,
        *,
        eos: int,
        train_tokens: int,
        eval_tokens: int,
        train_bytes: int,
        eval_bytes: int,
        documents: int,
        key: str,
    ) -> None:
        """Write the header, and rename the file atomically to its final name."""
        header = TokenFileHeader(
            self._vocab_size,
            eos,
            train_tokens,
            eval_tokens,
            train_bytes,
            eval_bytes,
            documents,
            key,
            self._digest.hexdigest(),
        )
        text = _MAGIC + json.dumps({**asdict(header), "seal": header.checksum}).encode()
        self._stream.seek(0)
        self._stream.write(text.ljust(_HEADER_BYTES))
        self._stream.flush()
        os.fsync(self._stream.fileno())
        os.replace(self._partial, self._path)


def open_tokens(path: Path, verify: bool = False) -> TokenFile:
    """Map a token file. `verify` also reads it completely and compares its hash.

    Raises:
        DataError: the file is missing, of another format version, truncated, or damaged.
    """
    header = read_header(path)
    itemsize = header.dtype.itemsize
    expected = _HEADER_BYTES + (header.train_tokens + header.eval_tokens) * itemsize
    actual = path.stat().st_size
    if actual != expected:
        raise DataError(
            f"token file {path} has {actual} bytes, and its header announces {expected}; delete it to build it again"
        )
    if verify and _payload_digest(path) != header.digest:
        raise DataError(
            f"token file {path} is damaged: its hash is not the one in its header; delete it to build it again"
        )
    tokens = np.memmap(path, dtype=header.dtype, mode="r", offset=_HEADER_BYTES)
    return TokenFile(path, header, tokens[: header.train_tokens], tokens[header.train_tokens :])


def read_header(path: Path) -> TokenFileHeader:
    """Read only the header.

    Raises:
        DataError: the file is missing, is not a token file, has a damaged header, or has a format version that this
            release does not read.
    """
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"token file {path} is not a regular file; delete it to build it again")
        with open(path, "rb") as stream:
            block = stream.read(_HEADER_BYTES)
    except OSError as error:
        raise DataError(f"cannot read token file {path}: {error.strerror or error}") from error
    damaged = DataError(f"{path} is not a token file, or its header is damaged; delete it to build it again")
    if not block.startswith(_MAGIC):
        raise damaged
    try:
        fields = parse_json(block[len(_MAGIC) :])
        version = fields["format_version"]
        if version != FORMAT_VERSION:
            raise DataError(
                f"token file {path} has format version {version}, this release reads {FORMAT_VERSION}; "
                "delete it to build it again"
            )
        seal = fields.pop("seal")
        header = TokenFileHeader(**fields)
        if header.checksum != seal or not _is_valid(header):
            raise damaged
        return header
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, DataError):
            raise
        raise damaged from error


def _is_valid(header: TokenFileHeader) -> bool:
    """Return True if every field has its type and is in its range."""
    counts = (header.train_tokens, header.eval_tokens, header.train_bytes, header.eval_bytes, header.documents)
    numbers = (*counts, header.vocab_size, header.eos)
    return (
        all(type(number) is int and 0 <= number < 2**62 for number in numbers)
        and header.eos < header.vocab_size <= 2**32
        and isinstance(header.key, str)
        and isinstance(header.digest, str)
    )


def _payload_digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as stream:
        stream.seek(_HEADER_BYTES)
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
