"""Records of a file of `torch.save`: a zip archive whose records are uncompressed.

Python's `zipfile` is not used for reading: it decompresses, accepts overlapping records, and takes ten times the memory
of a large archive's directory. Format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Iterator
from io import BufferedReader
from typing import NamedTuple

from windlass.checkpoint.checksum import crc32 as crc32_of

_END = struct.Struct("<4s4H2LH")  # end of the directory
_LOCATOR = struct.Struct("<4sLQL")  # position of the 64-bit end of the directory
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")  # entry of the directory
_LOCAL = struct.Struct("<4s22xHH")  # header of a record: lengths of its name and its extra fields
_COMMENT = 1 << 16
_FULL32 = 0xFFFFFFFF  # marks that the value is in a 64-bit field
_CHUNK_BYTES = 1 << 22


class ZipError(ValueError):
    """Error for an archive that is damaged, forged, or of a kind that `torch.save` never writes."""


class NotZipError(ZipError):
    """Error for a file that does not end as a zip archive."""


class ZipRecord(NamedTuple):
    """Bytes `[begin, end)` of the file, and their checksum."""

    name: str
    begin: int
    end: int
    crc32: int


class ZipRecords:
    """All records of an open file, in the order of their bytes. None is compressed, and no two overlap.

    Memory: about 300 bytes per record, less than three times the size of an empty record in the file.

    Raises:
        ZipError: the file is not such an archive.
        OSError: the file cannot be read.
    """

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        size = os.fstat(file.fileno()).st_size
        count, first, last = _find_directory(file, size)
        ordered = sorted(self._read_directory(count, first, last), key=lambda pair: pair[0])
        position = 0
        for start, record in ordered:
            if start < position or record.end > first:
                raise ZipError(f"record {record.name!r} overlaps another one")
            position = record.end
        self._ordered = [record for _, record in ordered]
        self._begins = [record.begin for record in self._ordered]
        self._by_name = {record.name: record for record in self._ordered}
        if len(self._by_name) != len(self._ordered):
            raise ZipError("two records have the same name")

    def __iter__(self) -> Iterator[ZipRecord]:
        return iter(self._ordered)

    def get(self, name: str) -> ZipRecord | None:
        """Return the record with a name, given without the archive's common folder; None if there is none."""
        return self._by_name.get(name)

    def record_covering(self, begin: int, end: int) -> ZipRecord | None:
        """Return the record that contains bytes `[begin, end)` of the file; None if there is none."""
        at = bisect_right(self._begins, begin) - 1
        found = self._ordered[at] if at >= 0 else None
        return found if found is not None and end <= found.end else None

    def read(self, record: ZipRecord, max_bytes: int) -> bytes:
        """Return the bytes of a record, after a check of their checksum.

        Raises:
            ZipError: there are more than `max_bytes`, or the bytes are damaged.
        """
        if record.end - record.begin > max_bytes:
            raise ZipError(
                f"record {record.name!r} has {record.end - record.begin} bytes, at most {max_bytes} are read"
            )
        self._file.seek(record.begin)
        found = self._file.read(record.end - record.begin)
        if len(found) != record.end - record.begin or crc32_of(found) != record.crc32:
            raise ZipError(f"record {record.name!r} does not have the crc32 that was written")
        return found

    def has_valid_crc32(self, record: ZipRecord) -> bool:
        """Return True if the bytes of a record match its checksum. Memory: 4 MiB."""
        self._file.seek(record.begin)
        left, found = record.end - record.begin, 0
        while left:
            part = self._file.read(min(_CHUNK_BYTES, left))
            if not part:
                return False
            found, left = crc32_of(part, found), left - len(part)
        return found == record.crc32

    def _read_directory(self, count: int, first: int, last: int) -> Iterator[tuple[int, ZipRecord]]:
        """Yield each record with the byte offset of its header."""
        self._file.seek(first)
        directory = self._file.read(last - first)
        at = 0
        for _ in range(count):
            if at + _ENTRY.size > len(directory):
                raise ZipError("its directory is truncated")
            sign, *_, flags, method, _, _, crc32, packed, size, named, extra, remark, _, _, _, start = (
                _ENTRY.unpack_from(directory, at)
            )
            begin, at = at + _ENTRY.size, at + _ENTRY.size + named + extra + remark
            if sign != b"PK\1\2" or at > len(directory):
                raise ZipError("its directory is damaged")
            name = directory[begin : begin + named]
            size, packed, start = _resolve_zip64(directory[begin + named : begin + named + extra], size, packed, start)
            if method or packed != size or flags & 1:
                raise ZipError(f"record {name!r:.100} is compressed or encrypted, which torch.save never does")
            data = self._data_offset(name, start)
            yield start, ZipRecord(name.decode("utf-8", "backslashreplace").partition("/")[2], data, data + size, crc32)
        if at != len(directory):
            raise ZipError("its directory has bytes after its last record")

    def _data_offset(self, name: bytes, start: int) -> int:
        """Return the byte offset of a record's data, which follows its header."""
        self._file.seek(start)
        header = self._file.read(_LOCAL.size + len(name))
        if len(header) < _LOCAL.size:
            raise ZipError(f"the header of record {name!r:.100} is truncated")
        sign, named, extra = _LOCAL.unpack_from(header)
        if sign != b"PK\3\4" or header[_LOCAL.size :] != name or named != len(name):
            raise ZipError(f"the header of record {name!r:.100} is damaged")
        data: int = start + _LOCAL.size + named + extra
        return data


def _find_directory(file: BufferedReader, size: int) -> tuple[int, int, int]:
    """Return the number of records, and the byte range of their directory."""
    tail_at = max(0, size - _END.size - _COMMENT - _LOCATOR.size)
    file.seek(tail_at)
    tail = file.read(size - tail_at)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or at + _END.size > len(tail):
        raise NotZipError("it has no end-of-archive record")
    _, disk, other, here, count, length, first, _ = _END.unpack_from(tail, at)
    last = tail_at + at
    if at >= _LOCATOR.size and tail[at - _LOCATOR.size : at - _LOCATOR.size + 4] == b"PK\6\7":
        last = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)[2]
        if last > size - _END64.size:
            raise ZipError("its end-of-archive record is damaged")
        file.seek(last)
        sign, _, _, _, disk, other, here, count, length, first = _END64.unpack(file.read(_END64.size))
        if sign != b"PK\6\6":
            raise ZipError("its end-of-archive record is damaged")
    if disk or other or here != count or first + length != last or count * _ENTRY.size > length:
        raise ZipError("its end-of-archive record does not match its directory")
    return count, first, last


def _resolve_zip64(extra: bytes, *values: int) -> tuple[int, ...]:
    """Return sizes and offset of a record. Values that do not fit in 32 bits are in an extra field."""
    if _FULL32 not in values:
        return values
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            wide = [struct.unpack_from("<Q", field, n)[0] for n in range(0, len(field) - 7, 8)]
            if len(wide) < values.count(_FULL32):
                break
            return tuple(wide.pop(0) if value == _FULL32 else value for value in values)
        at += 4 + length
    raise ZipError("a record lacks the 64-bit sizes that its directory announces")
