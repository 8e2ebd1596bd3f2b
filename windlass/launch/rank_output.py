"""Output of ranks: labelled lines on the console, one file per rank, and the last lines of each for error reports."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from windlass.launch.launch_errors import LaunchError
from windlass.launch.rank_processes import ERR, OUT

MAX_KEPT_LINES = 20
_MAX_LINE_BYTES = 1 << 16  # longer lines are shown in parts


@dataclass(frozen=True)
class OutputRouting:
    """Destinations of the ranks' output.

    Args:
        directory: folder of one file per rank; None: no files.
        file_name: name of a file, in which `{rank}` is replaced by the rank.
        file_only_streams: streams that go only to files, by local rank; -1 stands for all others.
        file_streams: streams that go to files, by local rank; -1 stands for all others.
        shown_local_ranks: local ranks that are shown; None: all.
    """

    directory: Path | None = None
    file_name: str = "rank{rank}.log"
    file_only_streams: Mapping[int, frozenset[str]] = field(default_factory=dict)
    file_streams: Mapping[int, frozenset[str]] = field(default_factory=lambda: {-1: frozenset((OUT, ERR))})
    shown_local_ranks: frozenset[int] | None = None

    def is_shown(self, local_rank: int, stream: str) -> bool:
        """Return True if this stream of this rank is shown on the console."""
        if self.shown_local_ranks is not None and local_rank not in self.shown_local_ranks:
            return False
        return stream not in _streams_for(self.file_only_streams, local_rank)

    def goes_to_file(self, local_rank: int, stream: str) -> bool:
        """Return True if this stream goes to the rank's file."""
        return self.directory is not None and stream in _streams_for(self.file_streams, local_rank)


class RankConsole:
    """Console that shows output of ranks line by line.

    Args:
        label: function from a rank to the label of its lines; "" for none.
        local_rank: function from a rank to its local rank.
        append: append to existing files instead of truncating them.
        emit: function that writes bytes to the stream `OUT` or `ERR`; None: `write_stream`.
    """

    def __init__(
        self,
        routing: OutputRouting,
        label: Callable[[int], str],
        local_rank: Callable[[int], int],
        *,
        append: bool = False,
        emit: Callable[[str, bytes], None] | None = None,
    ) -> None:
        self.routing, self._label, self._local_rank, self._append = routing, label, local_rank, append
        self._partial_lines: dict[tuple[int, str], bytes] = {}
        self._last_lines: dict[tuple[int, str], deque[str]] = {}
        self._newest_lines: dict[int, str] = {}
        self._files: dict[int, IO[bytes]] = {}
        self.emit: Callable[[str, bytes], None] = emit if emit is not None else write_stream
        if routing.directory is not None:
            _make_directory(routing.directory)

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Take bytes of a rank's stream. An incomplete line is held back until the rest arrives, up to 64 KiB.

        Raises:
            LaunchError: the rank's file cannot be written.
        """
        if self.routing.goes_to_file(self._local_rank(rank), stream):
            file = self._file(rank)
            try:
                file.write(data)
            except OSError as error:
                raise LaunchError(f"{file.name}: {error.strerror}; free space, or name another directory") from None
        *lines, rest = _split_lines(self._partial_lines.pop((rank, stream), b"") + data)
        if len(rest) > _MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        self._partial_lines[rank, stream] = rest
        self._emit(rank, stream, lines)

    def flush_rank(self, rank: int) -> None:
        """Show the incomplete last lines of a rank."""
        for stream in (OUT, ERR):
            if rest := self._partial_lines.pop((rank, stream), b""):
                self._emit(rank, stream, [rest + b"\n"])

    def last_lines(self, rank: int) -> list[str]:
        """Return the last lines of a rank's standard error, or of its standard output if standard error is empty."""
        return list(self._last_lines.get((rank, ERR)) or self._last_lines.get((rank, OUT)) or [])

    def newest_line(self, rank: int) -> str:
        """Return the last complete line of either stream."""
        return self._newest_lines.get(rank, "")

    def close(self) -> None:
        """Show all incomplete lines, and close the files."""
        for rank in {rank for rank, _ in self._partial_lines}:
            self.flush_rank(rank)
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _emit(self, rank: int, stream: str, lines: list[bytes]) -> None:
        if not lines:
            return
        last = self._last_lines.setdefault((rank, stream), deque(maxlen=MAX_KEPT_LINES))
        last.extend(text for line in lines if (text := line.decode(errors="replace").rstrip()))
        if last:
            self._newest_lines[rank] = last[-1]
        if self.routing.is_shown(self._local_rank(rank), stream):
            label = self._label(rank).encode()
            self.emit(stream, b"".join(label + line for line in lines))

    def _file(self, rank: int) -> IO[bytes]:
        if rank not in self._files:
            assert self.routing.directory is not None
            path = self.routing.directory / self.routing.file_name.format(rank=rank)
            try:
                self._files[rank] = path.open("ab" if self._append else "wb", buffering=0)
            except OSError as error:
                raise LaunchError(f"{path}: {error.strerror}; name another directory for the ranks' files") from None
        return self._files[rank]


def write_stream(stream: str, data: bytes) -> None:
    """Write to this process's standard output or error."""
    file = sys.stdout if stream == OUT else sys.stderr
    if file is None:  # the stream was closed when this process started
        return
    if hasattr(file, "buffer"):
        file.flush()
        file.buffer.write(data)
    else:
        file.write(data.decode(errors="replace"))
    file.flush()


def _split_lines(data: bytes) -> list[bytes]:
    """Return the lines with their ends, then the incomplete rest. A progress bar's carriage return ends a line too."""
    found = data.splitlines(keepends=True)
    # a line with a trailing carriage return is held back: it may be the first half of \r\n
    rest = found.pop() if found and not found[-1].endswith(b"\n") else b""
    return [*found, rest]


def _streams_for(table: Mapping[int, frozenset[str]], local_rank: int) -> frozenset[str]:
    return table.get(local_rank, table.get(-1, frozenset()))


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"{directory}: {error.strerror}; name a directory for the ranks' files") from None
