"""Checkpoints on disks that belong to single nodes: each node gets all files of it.

[Note: node-local checkpoints] Ranks that do not see the draft which rank 0 made write to a draft of their own node,
which the first of them makes. Once all files are written, and the index beside those of rank 0's node, the nodes send
each other what they lack. So the directory of every node holds the whole checkpoint, and any number of ranks, on any
node, can load it; it costs each node the room for all of it. Where all nodes share the directory nothing is different.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from windlass.base.errors import CheckpointError
from windlass.checkpoint.checkpoint_directory import disk_errors, fsync_directory
from windlass.checkpoint.checkpoint_ranks import CheckpointRanks

_CHUNK = 32 << 20  # bytes sent at a time


@dataclass(frozen=True)
class NodeDisks:
    """Which ranks write to one disk.

    Attributes:
        leaders: the first rank of each node that has a disk of its own; rank 0 first.
        mine: the leader of this rank's node.
    """

    leaders: tuple[int, ...]
    local_leader: int

    @classmethod
    def detect(cls, staging: Path, ranks: CheckpointRanks) -> NodeDisks:
        """The nodes, by who sees the draft that rank 0 made. Collective."""
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
        """There is more than one disk."""
        return len(self.leaders) > 1

    def replicate_files(self, staging: Path, ranks: CheckpointRanks) -> None:
        """Bring every file of all nodes' drafts to each of them. Collective.

        Args:
            place: the draft of this rank's node.

        Raises:
            CheckpointError: a file could not be read or written on some node; on all ranks.
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
    """A name of this node, the same for its ranks alone."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


def _send_files(staging: Path, others: list[int], ranks: CheckpointRanks, problems: list[str]) -> None:
    """Send what others lack; a file that can't be read is told to them too."""
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
    """The bytes of a file and None at its end; a text says what went wrong instead, and is the last."""
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except OSError as error:
        yield f"{path}: {error}"
        return
    yield None


def _receive_files(staging: Path, source: int, ranks: CheckpointRanks, problems: list[str]) -> None:
    """Receive and write what this node lacks. After a failure the rest is received and dropped: nobody waits."""
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
    """The bytes of one file, as they arrive.

    Attributes:
        trouble: why the sender could not read all of it, once the last piece has come.
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
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())


def _send_object(value: Any, to: int, ranks: CheckpointRanks) -> None:
    dist.send_object_list([value], group=ranks.group, group_dst=to)


def _receive_object(source: int, ranks: CheckpointRanks) -> Any:
    box: list[Any] = [None]
    dist.recv_object_list(box, group=ranks.group, group_src=source)
    return box[0]
