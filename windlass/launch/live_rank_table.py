"""Live table of ranks: host, rank, pid, state, memory, last line. If stderr is not a terminal, plain lines of text."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

from windlass.launch.rank_output import RankConsole
from windlass.launch.supervisor import RankEvents, resident_bytes_of

_TABLE_INTERVAL_S = 0.5
_TEXT_INTERVAL_S = 10.0
_MAX_LINE_WIDTH = 60


class LiveRankTable(RankEvents):
    """Rank events shown in a live table.

    Args:
        host_of_rank: host of each rank.
        is_local: True if the ranks are processes of this machine, whose memory is read here.
    """

    def __init__(
        self,
        console: RankConsole,
        hosts: Sequence[str],
        host_of_rank: Sequence[str],
        *,
        is_local: bool,
        workers: Collection[int] = (),
    ) -> None:
        super().__init__(console, hosts, workers)
        self._host_of_rank, self._is_local = host_of_rank, is_local
        self._next_update, self._start_time = 0.0, time.monotonic()
        self._live: Any = None

    def table_rows(self) -> list[tuple[str, str, str, str, str, str]]:
        """Return host, rank, pid, state, memory and last line of each rank."""
        assert self.console is not None
        found = []
        for rank, host in enumerate(self._host_of_rank):
            pid = self.pid_of_rank.get(rank)
            running = pid is not None and rank not in self.status_of_rank
            if self._is_local and pid is not None and running:
                self.memory_of_rank[rank] = resident_bytes_of(pid)
            memory = f"{self.memory_of_rank[rank] / 1e6:.0f} MB" if running and self.memory_of_rank.get(rank) else "-"
            last = self.console.newest_line(rank)
            found.append((host, str(rank), str(pid or "-"), self._describe_state(rank), memory, last[:_MAX_LINE_WIDTH]))
        return found

    def on_tick(self) -> None:
        """Update the table if the interval has passed."""
        if time.monotonic() < self._next_update:
            return
        if not sys.stderr.isatty():
            if self._next_update:
                self._print_rows()
            self._next_update = time.monotonic() + _TEXT_INTERVAL_S
            return
        self._next_update = time.monotonic() + _TABLE_INTERVAL_S
        self._update_table()

    def close(self) -> None:
        """Show the table for the last time."""
        if self._live is not None:
            self._update_table()
            self._live.stop()
            self._live = None
        else:
            self._print_rows()

    def _describe_state(self, rank: int) -> str:
        if rank in self.status_of_rank:
            status = self.status_of_rank[rank]
            return "ended" if status == 0 else f"exit code {status}" if status > 0 else f"signal {-status}"
        return "runs" if rank in self.pid_of_rank else "starts"

    def _print_rows(self) -> None:
        for host, rank, pid, state, memory, last in self.table_rows():
            text = f"{host} rank {rank} pid {pid} {state} {memory} | {last}"
            print(f"windlass run: {time.monotonic() - self._start_time:.0f} s: {text}", file=sys.stderr, flush=True)

    def _update_table(self) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text

        table = Table("host", "rank", "pid", "state", "memory", "last line")
        for row in self.table_rows():
            table.add_row(*map(Text, row))  # as Text, so that brackets are not taken for markup
        if self._live is None:
            assert self.console is not None
            screen = RichConsole(file=sys.stderr)
            self._live = Live(table, console=screen, auto_refresh=False, transient=False)
            self._live.start()
            self.console.emit = lambda stream, data: screen.print(
                Text.from_ansi(data.decode(errors="replace").rstrip("\n")), soft_wrap=True
            )
        self._live.update(table, refresh=True)
