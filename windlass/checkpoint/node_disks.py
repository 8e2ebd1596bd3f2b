"""Checkpoints on disks that belong to single nodes: each node gets all files.

[Note: node-local checkpoints] Ranks that cannot access rank 0's staging directory write to a staging directory of their
own node, which the node's first rank (its leader) creates. Once all files are written, and the index on rank 0's node,
the nodes send each other the missing files. So every node's directory holds the full checkpoint, and any number of
ranks on any node can load it; each node needs space for all of it. If all nodes share the directory, nothing is copied.

The other ranks of a node wait until the files are copied. Their leader sends them a message for each second of
progress, so that the watchdog does not take a long copy for a hang.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.base.atomic_file import make_directory, open_new
from windlass.base.collective_activity import activity
from windlass.base.errors import CheckpointError
from windlass.checkpoint.checkpoint_directory import disk_errors, fsync_directory
from windlass.checkpoint.checkpoint_ranks import CheckpointRanks

_CHUNK = 32 << 20  # bytes sent at a time
_NOTE_INTERVAL_S = 1.0  # seconds between messages of progress


@dataclass(frozen=True)
class NodeDisks:
    """Groups of ranks, one for each disk.

    Attributes:
        leaders: the first rank of each group; rank 0 first.
        local_leader: the leader of this rank's group.
        followers: the ranks of this rank's group other than its leader.
    """

    leaders: tuple[int, ...]
    local_leader: int
    followers: tuple[int, ...]

    @classmethod
    def detect(cls, staging: Path, ranks: CheckpointRanks) -> NodeDisks:
        """Group the ranks: one group with access to rank 0's staging directory, and one per other node. Collective."""
        names = ranks.run_on_all(
            "looking for a directory that is shared", lambda: None if staging.is_dir() else _node_name()
        )
        names[0] = None
        first: dict[str | None, int] = {}
        for rank, name in enumerate(names):
            first.setdefault(name, rank)
        own = names[ranks.rank]
        followers = tuple(rank for rank, name in enumerate(names) if name == own and rank != first[own])
        return cls(tuple(first.values()), first[own], followers)

    @property
    def has_several(self) -> bool:
        """True if there is more than one disk."""
        return len(self.leaders) > 1

    def replicate_files(self, staging: Path, ranks: CheckpointRanks) -> None:
        """Copy every file of all nodes' staging directories, except hidden ones, to each node. Collective.

        Args:
            staging: the staging directory of this rank's node.

        Raises:
            CheckpointError: a file could not be read or written on some node. Raised on all ranks.
        """
        step = "copying to the disks of other nodes"

        def work() -> None:
            with ranks.waiting(step):
                if ranks.rank == self.local_leader:
                    self._exchange_files(staging, ranks)
                else:
                    channel = _Channel(ranks)
                    while channel.receive(self.local_leader):
                        pass

        ranks.run_on_all(step, work)

    def _exchange_files(self, staging: Path, ranks: CheckpointRanks) -> None:
        channel, problems = _Channel(ranks, self.followers), list[str]()
        try:
            for source in self.leaders:
                if source == ranks.rank:
                    _send_files(staging, [leader for leader in self.leaders if leader != source], channel, problems)
                else:
                    _receive_files(staging, source, channel, problems)
            fsync_directory(staging)
        finally:
            channel.release_followers()
        if problems:
            raise CheckpointError("; ".join(problems))


def _node_name() -> str:
    """Return a name shared by exactly the ranks of this node."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


class _Channel:
    """Channel for objects between ranks. In the training thread, each transfer is reported to the watchdog as progress.

    Args:
        followers: ranks that receive True for each second of progress, until `release_followers` sends them False.
    """

    def __init__(self, ranks: CheckpointRanks, followers: tuple[int, ...] = ()) -> None:
        assert ranks.group is not None
        self._group, self._followers, self._is_watched = ranks.group, followers, not ranks.in_background
        self._noted = time.monotonic()

    def send(self, value: Any, to: int) -> None:
        self._group.send_object(value, to)
        self._note_progress()

    def receive(self, source: int) -> Any:
        value = self._group.receive_object(source)
        self._note_progress()
        return value

    def release_followers(self) -> None:
        for follower in self._followers:
            self._group.send_object(False, follower)

    def _note_progress(self) -> None:
        activity.progress_count += self._is_watched
        if time.monotonic() - self._noted >= _NOTE_INTERVAL_S:
            for follower in self._followers:
                self._group.send_object(True, follower)
            self._noted = time.monotonic()


def _send_files(staging: Path, others: list[int], channel: _Channel, problems: list[str]) -> None:
    """Send each node the files it lacks. An error while reading is sent too."""
    names = sorted(
        str(path.relative_to(staging)) for path in staging.rglob("*") if path.is_file() and path.name[0] != "."
    )
    lacking: dict[int, set[str]] = {}
    for other in others:
        channel.send(names, other)
        lacking[other] = set(channel.receive(other))
    for name in names:
        to = [other for other in others if name in lacking[other]]
        for chunk in _read_chunks(staging / name) if to else ():
            for other in to:
                channel.send(chunk, other)
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


def _receive_files(staging: Path, source: int, channel: _Channel, problems: list[str]) -> None:
    """Receive and write the files that this node lacks.

    After a failure, receive and drop the rest: the sender must not block.
    """
    names = [name for name in channel.receive(source) if not (staging / name).exists()]
    channel.send(names, source)
    for name in names:
        arriving = _IncomingFile(source, channel)
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

    def __init__(self, source: int, channel: _Channel) -> None:
        self._source, self._channel, self._ended = source, channel, False
        self.error = ""

    def __iter__(self) -> _IncomingFile:
        return self

    def __next__(self) -> bytes:
        chunk = None if self._ended else self._channel.receive(self._source)
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
