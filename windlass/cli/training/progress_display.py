"""Progress display of a run: one live line on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from windlass.base.log import logger
from windlass.cli.training.run_metrics import MetricsRow

_MAX_PLAIN_LINES = 5


class ProgressDisplay:
    """Progress of a run of `total` steps that starts after step `first_step`. Used on one rank only."""

    def __init__(self, total: int, first_step: int, console: Console | None = None) -> None:
        self._total, self._first_step = total, first_step
        self._started = time.monotonic()
        self._log_interval = max(1, (total - first_step) // _MAX_PLAIN_LINES)
        console = console or Console(file=sys.stderr)
        self._live: Progress | None = None
        if console.is_terminal:
            self._live = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                console=console,
            )
            self._live.start()
            self._task: TaskID = self._live.add_task("", total=total, completed=first_step)

    def show_step(self, row: MetricsRow) -> None:
        """Show one optimizer step."""
        text = describe_row(row) + f"  left {format_duration(self.seconds_left(row.step))}"
        if self._live is not None:
            self._live.update(self._task, completed=row.step, description=text)
        elif (row.step - self._first_step) % self._log_interval == 0 or row.step == self._total:
            logger.info("step %d/%d  %s", row.step, self._total, text)

    def show_note(self, text: str) -> None:
        """Print a line that stays above the live line."""
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False)
        else:
            logger.info(text)

    def seconds_left(self, step: int) -> float:
        """Estimate the remaining seconds from the pace so far, which includes held-out evaluations."""
        return (time.monotonic() - self._started) / max(step - self._first_step, 1) * (self._total - step)

    def close(self) -> None:
        """Restore the terminal."""
        if self._live is not None:
            self._live.stop()


def describe_row(row: MetricsRow) -> str:
    """Format the measured values of a step in one line."""
    parts = [
        _format_part("loss {:.3f}", row.loss),
        _format_part("ppl {:,.1f}", row.perplexity),
        _format_part("{:,.0f} tok/s", row.tokens_per_second),
        _format_part("lr {:.2e}", row.learning_rate),
        _format_part("grad {:.2f}", row.gradient_norm),
        _format_part("mem {:,.0f} MB", None if row.memory_bytes is None else row.memory_bytes / 1e6),
    ]
    return "  ".join(part for part in parts if part)


def format_duration(seconds: float) -> str:
    """Format seconds as `1:05` or `2:00:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _format_part(template: str, value: float | None) -> str:
    return "" if value is None else template.format(value)
