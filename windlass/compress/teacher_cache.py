"""Disk cache of the largest probabilities of a teacher, so that the teacher computes each sequence once."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from windlass.base.atomic_file import make_directory, open_new, write_atomically
from windlass.base.bounded_json import parse_json
from windlass.base.errors import ConfigError, DataError
from windlass.base.log import logger
from windlass.compress.distillation_losses import TopProbabilities

_VERSION = 1


class TeacherCache:
    """Top probabilities of a teacher by sequence, in a folder.

    Sequences are found by a hash of their token ids, so that neither their order nor the number of ranks matters. Each
    rank appends the sequences that no other rank has stored to its own file, and reads the files of all ranks, also
    while they grow. A record that an interrupted run left incomplete is ignored.

    Args:
        folder: folder of the files; created if it is missing.
        top_k: number of classes to store for each position.
        temperature: temperature of the distributions.
        teacher: text that identifies the teacher. A folder of another teacher is refused; None: any is accepted.
        rank: rank of this process.

    Raises:
        ConfigError: the folder was made with other settings.
        DataError: the header of the folder cannot be read.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        top_k: int = 64,
        temperature: float = 1.0,
        teacher: str | None = None,
        rank: int = 0,
    ) -> None:
        self.folder, self.rank = Path(folder), rank
        self._settings: dict[str, Any] = {
            "version": _VERSION, "top_k": top_k, "temperature": temperature, "teacher": teacher,
        }  # fmt: skip
        self._form: np.dtype[Any] | None = None
        self._length = self._classes = 0
        self._places: dict[bytes, tuple[Path, int]] = {}  # file and number of the record of each key
        self._counts: dict[Path, int] = {}  # number of records of each file that are in `_places`
        make_directory(self.folder)
        self._find_records()
        for path, count in self._counts.items():
            if path.stat().st_size > count * self._record_bytes():
                logger.warning("%s ends with a record that is not complete; it is ignored", path)

    @property
    def _header(self) -> Path:
        return self.folder / "header.json"

    @property
    def temperature(self) -> float:
        """Temperature of the distributions."""
        return float(self._settings["temperature"])

    def __len__(self) -> int:
        return len(self._places)

    def has(self, ids: Tensor) -> bool:
        """Return True if every row of token ids `[rows, length]` is cached."""
        keys = _keys(ids)
        if not all(key in self._places for key in keys):
            self._find_records()
        return all(key in self._places for key in keys)

    def add(self, ids: Tensor, logits: Tensor) -> None:
        """Store the largest log-probabilities of logits `[rows, length, classes]` for rows not cached yet.

        Raises:
            DataError: the folder has sequences of another length or number of classes.
        """
        with self._locked():
            self._find_records()
            self._append(ids, logits)

    def _append(self, ids: Tensor, logits: Tensor) -> None:
        classes = logits.shape[-1]
        if self._form is None:
            self._create(ids.shape[1], classes)
        if (ids.shape[1], classes) != (self._length, self._classes):
            raise DataError(
                f"{self.folder} has sequences of {self._length} tokens and {self._classes} classes, not of "
                f"{ids.shape[1]} and {classes}; pad all batches to one length, or use another folder"
            )
        assert self._form is not None
        rows = {key: row for row, key in enumerate(_keys(ids)) if key not in self._places}
        if not rows:
            return
        count = self._form["values"].shape[1]
        values, indices = F.log_softmax(logits.detach().float() / self.temperature, -1).topk(count)
        path = self.folder / f"rank{self.rank}.bin"
        records = np.zeros(len(rows), self._form)
        for record, (key, row) in zip(records, rows.items(), strict=True):
            record["key"] = np.frombuffer(key, np.uint8)
            record["values"] = values[row].cpu().numpy()
            record["indices"] = indices[row].cpu().numpy()
            record["crc"] = _checksum(record)
        with open_new(path, "ab", buffering=0) as file:
            start = file.tell() - file.tell() % self._form.itemsize
            file.truncate(start)  # after the last complete record
            try:
                _write_all(file, records.tobytes())
            except BaseException:
                file.truncate(start)  # a later record would otherwise begin in the middle of an incomplete one
                raise
        self._find_records()

    def read(self, ids: Tensor) -> TopProbabilities:
        """Return the probabilities of rows of token ids `[rows, length]`.

        Raises:
            DataError: a row is missing, or damaged.
        """
        if not self.has(ids):  # finds the records that other ranks have stored meanwhile
            raise DataError(
                f"{self.folder} lacks a sequence of this batch; give a teacher that computes it, or train on the "
                "sequences that the folder was made for"
            )
        records = [self._record(key) for key in _keys(ids)]
        return TopProbabilities(
            torch.from_numpy(np.stack([record["values"] for record in records]).astype(np.float32)),
            torch.from_numpy(np.stack([record["indices"] for record in records]).astype(np.int64)),
            self.temperature,
            self._classes,
        )

    def _record(self, key: bytes) -> Any:
        (path, place), form = self._places[key], self._form
        assert form is not None
        with open(path, "rb") as file:
            file.seek(place * form.itemsize)
            data = file.read(form.itemsize)
        record = np.frombuffer(data, form)[0] if len(data) == form.itemsize else None
        if record is None or record["key"].tobytes() != key or record["crc"] != _checksum(record):
            raise DataError(f"record {place} of {path} is damaged; delete the file")
        return record

    def _create(self, length: int, classes: int) -> None:
        header = {**self._settings, "length": length, "classes": classes}
        write_atomically(self._header, json.dumps(header, indent=2) + "\n")  # all ranks write the same header
        self._set_form(length, classes)

    def _record_bytes(self) -> int:
        return 0 if self._form is None else self._form.itemsize

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder, so that only one of several ranks with the same sequence stores the sequence."""
        with open_new(self.folder / "lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:  # a child forked meanwhile shares the lock, so closing the file is not enough
                fcntl.flock(file, fcntl.LOCK_UN)

    def _find_records(self) -> None:
        """Find the complete records that were written since the last call, by any rank."""
        if self._form is None:
            if not self._header.is_file():
                return
            self._read_header()
        assert self._form is not None
        for path in sorted(self.folder.glob("rank*.bin")):
            first, count = self._counts.get(path, 0), path.stat().st_size // self._form.itemsize
            if count > first:
                offset = first * self._form.itemsize
                keys = np.memmap(path, self._form, "r", offset, shape=(count - first,))["key"]
                for place, key in enumerate(keys, first):
                    self._places.setdefault(key.tobytes(), (path, place))
            self._counts[path] = max(first, count)

    def _read_header(self) -> None:
        try:
            header = parse_json(self._header.read_bytes())
            length, classes = int(header["length"]), int(header["classes"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"cannot read {self._header} ({error}); delete the folder") from error
        for name, value in self._settings.items():
            if header.get(name) != value and not (name == "teacher" and value is None):
                raise ConfigError(
                    f"{self.folder} was made with {name} {header.get(name)!r}, not {value!r}; use another folder, or "
                    "delete it"
                )
        self._set_form(length, classes)

    def _set_form(self, length: int, classes: int) -> None:
        self._length, self._classes = length, classes
        count = min(int(self._settings["top_k"]), classes)
        index = "<u2" if classes <= 1 << 16 else "<u4"
        self._form = np.dtype(
            [
                ("key", "u1", (16,)),
                ("crc", "<u4"),
                ("values", "<f2", (length, count)),
                ("indices", index, (length, count)),
            ]
        )


def _write_all(file: io.FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _keys(ids: Tensor) -> list[bytes]:
    rows = ids.detach().to("cpu", torch.int64).contiguous().numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


def _checksum(record: Any) -> int:
    return zlib.crc32(record["indices"].tobytes(), zlib.crc32(record["values"].tobytes()))
