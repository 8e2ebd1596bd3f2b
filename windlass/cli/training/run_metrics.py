"""Metrics of a run: a CSV file, from which the loss curve is drawn, and TensorBoard events."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from windlass.base.atomic_file import write_atomically
from windlass.base.errors import ConfigError, DataError
from windlass.base.log import logger
from windlass.observe.monitor_writers import TensorBoardWriter


@dataclass(frozen=True)
class MetricsRow:
    """Metrics of one step. `step` counts the optimizer steps so far. Values that were not measured are None."""

    step: int
    loss: float | None = None  # nats per token, mean over the global batch
    perplexity: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    tokens_per_second: float | None = None
    memory_bytes: int | None = None
    held_out_bits_per_byte: float | None = None


COLUMNS = [field.name for field in fields(MetricsRow)]


class MetricsLog:
    """Metrics file at `path`, and TensorBoard events in `events` (unless None) if TensorBoard is installed. Used on one
    rank only."""

    def __init__(self, path: Path, events: Path | None, after_step: int) -> None:
        """Open the file and drop rows later than `after_step`, because a resumed run repeats their steps."""
        rows = [row for row in read_rows(path) if row.step <= after_step] if after_step and path.is_file() else []
        kept = io.StringIO(newline="")
        writer = csv.DictWriter(kept, COLUMNS)
        writer.writeheader()
        writer.writerows(map(asdict, rows))
        write_atomically(path, kept.getvalue())
        self._stream: TextIO = open(path, "a", newline="")  # noqa: SIM115  closed in close()
        self._writer = csv.DictWriter(self._stream, COLUMNS)
        self._tensorboard = _make_tensorboard_writer(events) if events else None

    def append(self, row: MetricsRow) -> None:
        """Write and flush one row, so that the file contains the row when the call returns."""
        values = asdict(row)
        self._writer.writerow(values)
        self._stream.flush()
        if self._tensorboard is not None:
            shown = {name: value for name, value in values.items() if value is not None and name != "step"}
            self._tensorboard.write([(f"train/{name}", value, row.step) for name, value in shown.items()])

    def close(self) -> None:
        """Close the file and the TensorBoard writer."""
        self._stream.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def read_rows(path: Path) -> list[MetricsRow]:
    """Read the rows of a metrics file.

    Raises:
        DataError: the file cannot be read, or is not a metrics file.
    """
    try:
        lines = path.read_text().splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):  # a killed run or a full disk left an incomplete row
            lines.pop()
        return [_parse_row(record) for record in csv.DictReader(lines)]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise DataError(f"cannot read the metrics of an earlier run in {path} ({error!r}); move it away") from error


def perplexity(loss: float) -> float:
    """Return e to the power of the loss; infinite if that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def _parse_row(record: dict[str, str]) -> MetricsRow:
    numbers: dict[str, Any] = {name: float(record[name]) if record[name] else None for name in COLUMNS[1:]}
    return MetricsRow(step=int(record["step"]), **numbers)


def _make_tensorboard_writer(folder: Path) -> TensorBoardWriter | None:
    try:
        return TensorBoardWriter(folder)
    except ConfigError:
        logger.info("TensorBoard is not installed (pip install 'windlass[monitor]'); metrics go to CSV only")
        return None
