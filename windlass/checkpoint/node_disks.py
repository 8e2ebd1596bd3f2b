"""Checkpoints on disks that belong to single nodes: each node gets all files.

[Note: node-local checkpoints] Ranks that do not see rank 0's staging directory write to one on their own node, which
the first of them creates. Once all files are written, and the index on rank 0's node, the nodes send each other the
missing files. So every node's directory holds the full checkpoint, and any number of ranks on any node can load it;
each node needs space for all of it. If all nodes share the directory, nothing changes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.base.atomic_file import make_directory, open_new
from windlass.base.errors import CheckpointError
from windlass.checkpoint.checkpoint_directory import disk_errors, fsync_directory
from windlass.checkpoint.checkpoint_ranks import CheckpointRanks

_CHUNK = 32 << 20  # bytes sent at a time


@dataclass(frozen=True)
class NodeDisks:
    """Groups of ranks that write to one disk.

    Attributes:
        leaders: the first rank of each node with a disk of its own; rank 0 first.
        local_leader: the leader of this rank's node.
    """

    leaders: tuple[int, ...]
    local_leader: int

    @classmethod
    def detect(cls, staging: Path, ranks: CheckpointRanks) -> NodeDisks:
        """Group the ranks: those that see rank 0's staging directory, and the others by node. Collective."""
        names = ranks.run_on_all(
            "looking for a directory that is shared", lambda: None if staging.is_dir() else _node_name()
        )
        names[0] = None
        first: dict[str | None, int] = {}
        for rank, name in enumerate(names):
            first.setdefault(name, rank)
        return cls(tuple(first.values()), first[names[ranks.rank]])

    @property
    def has_several(self) -> bool:
        """True if there is more than one disk."""
        return len(self.leaders) > 1

    def replicate_files(self, staging: Path, ranks: CheckpointRanks) -> None:
        """Copy every file of all nodes' staging directories to each node. Collective.

        Args:
            staging: the staging directory of this rank's node.

        Raises:
            CheckpointError: a file could not be read or written on some node. Raised on all ranks.
        """
        ranks.run_on_all("copying to the disks of other nodes", lambda: self._exchange_files(staging, ranks))

    def _exchange_files(self, staging: Path, ranks: CheckpointRanks) -> None:
        if ranks.rank not in self.leaders:
            return
        problems: list[str] = []
        for source in self.leaders:
            if source == ranks.rank:
                _send_files(staging, [leader for leader in self.leaders if leader != source], ranks, problems)
            else:
                _receive_files(staging, source, ranks, problems)
        fsync_directory(staging)
        if problems:
            raise CheckpointError("; ".join(problems))


def _node_name() -> str:
    """Return a name shared by exactly the ranks of this node."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


def _send_files(staging: Path, others: list[int], ranks: CheckpointRanks, problems: list[str]) -> None:
    """Send each node the files it lacks. An error while reading is sent too."""
    names = sorted(
        str(path.relative_to(staging)) for path in staging.rglob("*") if path.is_file() and path.name[0] != "."
    )
    lacking: dict[int, set[str]] = {}
    for other in others:
        _send_object(names, other, ranks)
        lacking[other] = set(_receive_object(other, ranks))
    for name in names:
        to = [other for other in others if name in lacking[other]]
        for chunk in _read_chunks(staging / name) if to else ():
            for other in to:
                _send_object(chunk, other, ranks)
            if isinstance(chunk, str):
                problems.append(chunk)


def _read_chunks(path: Path) -> Iterator[bytes | str | None]:
    """Yield the bytes of a file, then None. After an error, yield its text instead and stop."""
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except OSError as error:
        yield f"{path}: {error}"
        return
    yield None


def _receive_files(staging: Path, source: int, ranks: CheckpointRanks, problems: list[str]) -> None:
    """Receive and write the files that this node lacks.

    After a failure, receive and drop the rest: the sender must not block.
    """
    names = [name for name in _receive_object(source, ranks) if not (staging / name).exists()]
    _send_object(names, source, ranks)
    for name in names:
        arriving = _IncomingFile(source, ranks)
        try:
            _write(staging / name, arriving)
        except CheckpointError as error:
            problems.append(str(error))
        for _ in arriving:
            pass
        if arriving.error:
            problems.append(arriving.error)


class _IncomingFile:
    """Iterator over the bytes of one file as they arrive.

    Attributes:
        error: the sender's error, set after the last chunk; empty if the file is complete.
    """

    def __init__(self, source: int, ranks: CheckpointRanks) -> None:
        self._source, self._ranks, self._ended = source, ranks, False
        self.error = ""

    def __iter__(self) -> _IncomingFile:
        return self

    def __next__(self) -> bytes:
        chunk = None if self._ended else _receive_object(self._source, self._ranks)
        if isinstance(chunk, bytes):
            return chunk
        self._ended = True
        self.error = chunk or self.error
        raise StopIteration


def _write(path: Path, chunks: Iterator[bytes]) -> None:
    with disk_errors(path, 0):
        make_directory(path.parent)
        with open_new(path) as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())


def _send_object(value: Any, to: int, ranks: CheckpointRanks) -> None:
    assert ranks.group is not None
    ranks.group.send_object(value, to)


def _receive_object(source: int, ranks: CheckpointRanks) -> Any:
    assert ranks.group is not None
    return ranks.group.receive_object(source)
