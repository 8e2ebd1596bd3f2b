"""Where tables go: the terminal, and wide enough for a table where there is none."""

from __future__ import annotations

import sys

from rich.console import Console

_WIDTH_WITHOUT_TERMINAL = 170


def bench_console() -> Console:
    """A console for stdout; a pipe or a file gets lines of up to 170 characters."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL, highlight=False)
