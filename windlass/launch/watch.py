"""A live table of ranks: host, rank, pid, state, memory, last line; lines of text where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from windlass.launch.conduct import Events, memory_of
from windlass.launch.console import Console

_TABLE_S = 0.5
_TEXT_S = 10.0
_WIDEST = 60


class Watch(Events):
    """Events that are shown as they come.

    Args:
        all_hosts: the host of each rank.
        here: ranks are processes of this machine, whose memory is read here.
    """

    def __init__(self, console: Console, hosts: Sequence[str], all_hosts: Sequence[str], *, here: bool) -> None:
        super().__init__(console, hosts)
        self._all_hosts, self._here = all_hosts, here
        self._next, self._begin = 0.0, time.monotonic()
        self._live: Any = None

    def rows(self) -> list[tuple[str, str, str, str, str, str]]:
        """Host, rank, pid, state, memory and last line of each rank."""
        assert self.console is not None
        found = []
        for rank, host in enumerate(self._all_hosts):
            pid = self.pids.get(rank)
            running = pid is not None and rank not in self.statuses
            if self._here and pid is not None and running:
                self.memory[rank] = memory_of(pid)
            memory = f"{self.memory[rank] / 1e6:.0f} MB" if running and self.memory.get(rank) else "-"
            last = self.console.newest_line(rank)
            found.append((host, str(rank), str(pid or "-"), self._state(rank), memory, last[:_WIDEST]))
        return found

    def tick(self) -> None:
        """Show the table again when it is time."""
        if time.monotonic() < self._next:
            return
        if not sys.stderr.isatty():
            if self._next:
                self._print()
            self._next = time.monotonic() + _TEXT_S
            return
        self._next = time.monotonic() + _TABLE_S
        self._update()

    def finish(self) -> None:
        """Show it for the last time."""
        if self._live is not None:
            self._update()
            self._live.stop()
            self._live = None
        else:
            self._print()

    def _state(self, rank: int) -> str:
        if rank in self.statuses:
            status = self.statuses[rank]
            return "ended" if status == 0 else f"exit code {status}" if status > 0 else f"signal {-status}"
        return "runs" if rank in self.pids else "starts"

    def _print(self) -> None:
        for host, rank, pid, state, memory, last in self.rows():
            text = f"{host} rank {rank} pid {pid} {state} {memory} | {last}"
            print(f"windlass run: {time.monotonic() - self._begin:.0f} s: {text}", file=sys.stderr, flush=True)

    def _update(self) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text

        table = Table("host", "rank", "pid", "state", "memory", "last line")
        for row in self.rows():
            table.add_row(*map(Text, row))  # as it is: brackets are no markup
        if self._live is None:
            assert self.console is not None
            screen = RichConsole(file=sys.stderr)
            self._live = Live(table, console=screen, auto_refresh=False, transient=False)
            self._live.start()
            self.console.show = lambda stream, data: screen.print(
                Text.from_ansi(data.decode(errors="replace").rstrip("\n")), soft_wrap=True
            )
        self._live.update(table, refresh=True)
