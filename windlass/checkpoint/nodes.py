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
from windlass.checkpoint.agree import Ranks
from windlass.checkpoint.directory import disk_errors, sync_directory

_CHUNK = 32 << 20  # bytes sent at a time


@dataclass(frozen=True)
class Nodes:
    """Which ranks write to one disk.

    Attributes:
        leaders: the first rank of each node that has a disk of its own; rank 0 first.
        mine: the leader of this rank's node.
    """

    leaders: tuple[int, ...]
    mine: int

    @classmethod
    def found(cls, draft: Path, ranks: Ranks) -> Nodes:
        """The nodes, by who sees the draft that rank 0 made. Collective."""
        names = ranks.each("looking for a directory that is shared", lambda: None if draft.is_dir() else _node())
        names[0] = None
        first: dict[str | None, int] = {}
        for rank, name in enumerate(names):
            first.setdefault(name, rank)
        return cls(tuple(first.values()), first[names[ranks.rank]])

    @property
    def several(self) -> bool:
        """There is more than one disk."""
        return len(self.leaders) > 1

    def share_out(self, place: Path, ranks: Ranks) -> None:
        """Bring every file of all nodes' drafts to each of them. Collective.

        Args:
            place: the draft of this rank's node.

        Raises:
            CheckpointError: a file could not be read or written on some node; on all ranks.
        """
        ranks.each("copying to the disks of other nodes", lambda: self._share_out(place, ranks))

    def _share_out(self, place: Path, ranks: Ranks) -> None:
        if ranks.rank not in self.leaders:
            return
        problems: list[str] = []
        for source in self.leaders:
            if source == ranks.rank:
                _give(place, [leader for leader in self.leaders if leader != source], ranks, problems)
            else:
                _take(place, source, ranks, problems)
        sync_directory(place)
        if problems:
            raise CheckpointError("; ".join(problems))


def _node() -> str:
    """A name of this node, the same for its ranks alone."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


def _give(place: Path, others: list[int], ranks: Ranks, problems: list[str]) -> None:
    """Send what others lack; a file that can't be read is told to them too."""
    names = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file() and path.name[0] != ".")
    lacking: dict[int, set[str]] = {}
    for other in others:
        _send(names, other, ranks)
        lacking[other] = set(_receive(other, ranks))
    for name in names:
        to = [other for other in others if name in lacking[other]]
        for chunk in _chunks(place / name) if to else ():
            for other in to:
                _send(chunk, other, ranks)
            if isinstance(chunk, str):
                problems.append(chunk)


def _chunks(path: Path) -> Iterator[bytes | str | None]:
    """The bytes of a file and None at its end; a text says what went wrong instead, and is the last."""
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except OSError as error:
        yield f"{path}: {error}"
        return
    yield None


def _take(place: Path, source: int, ranks: Ranks, problems: list[str]) -> None:
    """Receive and write what this node lacks. After a failure the rest is received and dropped: nobody waits."""
    names = [name for name in _receive(source, ranks) if not (place / name).exists()]
    _send(names, source, ranks)
    for name in names:
        arriving = _Arriving(source, ranks)
        try:
            _write(place / name, arriving)
        except CheckpointError as error:
            problems.append(str(error))
        for _ in arriving:
            pass
        if arriving.trouble:
            problems.append(arriving.trouble)


class _Arriving:
    """The bytes of one file, as they arrive.

    Attributes:
        trouble: why the sender could not read all of it, once the last piece has come.
    """

    def __init__(self, source: int, ranks: Ranks) -> None:
        self._source, self._ranks, self._ended = source, ranks, False
        self.trouble = ""

    def __iter__(self) -> _Arriving:
        return self

    def __next__(self) -> bytes:
        chunk = None if self._ended else _receive(self._source, self._ranks)
        if isinstance(chunk, bytes):
            return chunk
        self._ended = True
        self.trouble = chunk or self.trouble
        raise StopIteration


def _write(path: Path, chunks: Iterator[bytes]) -> None:
    with disk_errors(path, 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())


def _send(value: Any, to: int, ranks: Ranks) -> None:
    dist.send_object_list([value], group=ranks.group, group_dst=to)


def _receive(source: int, ranks: Ranks) -> Any:
    box: list[Any] = [None]
    dist.recv_object_list(box, group=ranks.group, group_src=source)
    return box[0]
