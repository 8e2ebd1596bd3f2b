"""Console on which experiments print their tables."""

from __future__ import annotations

import sys

from rich.console import Console

from windlass.base.printable_console import WIDTH_WITHOUT_TERMINAL


def bench_console() -> Console:
    """Create a console for stdout; lines are up to 170 characters wide if stdout is a pipe or a file."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL, highlight=False)
