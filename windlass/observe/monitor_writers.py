"""Writers of metrics to TensorBoard, CSV files, Weights & Biases and Comet, from rank 0."""

from __future__ import annotations

import csv
import os
import stat
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, SupportsFloat

import torch

from windlass.base.atomic_file import make_directory, open_new
from windlass.base.errors import ConfigError
from windlass.base.log import logger

Event = tuple[str, float, int]
"""Name of a metric (`Train/loss`), its value, and its step."""


class _FileMonitorSection(Protocol):
    @property
    def enabled(self) -> bool: ...
    @property
    def output_path(self) -> str: ...
    @property
    def job_name(self) -> str: ...


class _WandbSection(Protocol):
    @property
    def enabled(self) -> bool: ...
    @property
    def group(self) -> str | None: ...
    @property
    def team(self) -> str | None: ...
    @property
    def project(self) -> str: ...


class _CometSection(Protocol):
    @property
    def enabled(self) -> bool: ...
    @property
    def samples_log_interval(self) -> int: ...
    @property
    def project(self) -> str | None: ...
    @property
    def workspace(self) -> str | None: ...
    @property
    def api_key(self) -> str | None: ...
    @property
    def experiment_name(self) -> str | None: ...
    @property
    def experiment_key(self) -> str | None: ...
    @property
    def online(self) -> bool | None: ...
    @property
    def mode(self) -> str | None: ...


class MonitorSections(Protocol):
    """Sections of the configuration that `RunMonitor` reads."""

    @property
    def tensorboard(self) -> _FileMonitorSection: ...
    @property
    def csv_monitor(self) -> _FileMonitorSection: ...
    @property
    def wandb(self) -> _WandbSection: ...
    @property
    def comet(self) -> _CometSection: ...


class EventWriter(Protocol):
    """Destination of events."""

    def write(self, events: list[Event]) -> None:
        """Write the events. Files are flushed."""

    def close(self) -> None:
        """Finish. Nothing is written afterwards."""


class RunMonitor:
    """All writers that the configuration enables; none on ranks other than 0.

    Each `write_events` flushes the files before it returns, so an interrupt loses at most the events of a running
    call. A writer that fails (disk full, network) is removed with an error in the log, and training continues.

    Args:
        config: configuration with the sections `tensorboard`, `csv_monitor`, `wandb` and `comet`.
        rank: rank of this process; by default torch.distributed's, else the environment's RANK, else 0.

    Raises:
        ConfigError: the package of an enabled section is not installed, its folder can't be created, or its service
            can't start.
    """

    def __init__(self, config: MonitorSections, rank: int | None = None) -> None:
        self._writers: dict[str, EventWriter] = {}
        if (_rank() if rank is None else rank) != 0:
            return
        made: list[tuple[str, bool, Callable[[], EventWriter]]] = [
            (
                "tensorboard",
                config.tensorboard.enabled,
                lambda: TensorBoardWriter(_event_folder(config.tensorboard, "runs")),
            ),
            (
                "csv_monitor",
                config.csv_monitor.enabled,
                lambda: CsvWriter(_event_folder(config.csv_monitor, "csv_monitor")),
            ),
            ("wandb", config.wandb.enabled, lambda: WandbWriter(config.wandb)),
            ("comet", config.comet.enabled, lambda: CometWriter(config.comet)),
        ]
        for name, enabled, make in made:
            if enabled:
                self._writers[name] = _start_writer(name, make)

    @property
    def enabled(self) -> bool:
        """True if any writer is enabled. If False, a training loop need not compute events."""
        return bool(self._writers)

    def writer(self, name: str) -> EventWriter | None:
        """Return the writer of a section of the configuration; None if this rank does not write there."""
        return self._writers.get(name)

    def write_events(self, events: Iterable[tuple[str, SupportsFloat, int]]) -> None:
        """Write `(name, value, step)` triples to every writer. A value may be a one-element tensor."""
        if not self._writers:
            return
        plain = [(name, float(value), int(step)) for name, value, step in events]
        for name, writer in list(self._writers.items()):
            try:
                writer.write(plain)
            except Exception as error:  # wandb and comet_ml raise exceptions of their own
                logger.error(f"{name}: cannot write ({error}); nothing more is written there in this run")
                del self._writers[name]
                _close(name, writer)

    def close(self) -> None:
        """Close every writer. May be called twice."""
        while self._writers:
            _close(*self._writers.popitem())

    def __enter__(self) -> RunMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class CsvWriter:
    """Writer of one CSV file per metric, `Train_loss.csv` for `Train/loss`, with rows `step,loss`.

    Existing files are continued.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_directory(folder)

    def write(self, events: list[Event]) -> None:
        """Append one row per event. Each file is opened once per call."""
        by_name: dict[str, list[tuple[int, float]]] = {}
        for name, value, step in events:
            by_name.setdefault(name, []).append((step, value))
        for name, rows in by_name.items():
            path = self.folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with open_new(path, "a", newline="") as file:  # closed after each write, so that no row stays in a buffer
                writer = csv.writer(file, lineterminator="\n")
                if file.tell() == 0:
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerows(rows)

    def close(self) -> None:
        """Do nothing: no file is open."""


class TensorBoardWriter:
    """Writer of TensorBoard event files through torch's SummaryWriter, the attribute `summary_writer`.

    Raises:
        ConfigError: the package tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(_missing_package_message("tensorboard", "tensorboard", "monitor", error)) from error
        make: Callable[..., Any] = SummaryWriter
        make_directory(folder)
        self.summary_writer = make(log_dir=str(folder))
        for path in folder.glob(f"*.{os.getpid()}.*"):  # TensorBoard may create a file that all users can write
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~stat.S_IWOTH)

    def write(self, events: list[Event]) -> None:
        """Add the scalars and flush."""
        for name, value, step in events:
            self.summary_writer.add_scalar(name, value, step)
        self.summary_writer.flush()

    def close(self) -> None:
        """Finish the event file."""
        self.summary_writer.close()


class WandbWriter:
    """Writer of a Weights & Biases run, the attribute `run`.

    Raises:
        ConfigError: the package wandb is not installed, or it can't start (no key, no network).
    """

    def __init__(self, section: _WandbSection) -> None:
        try:
            wandb = import_module("wandb")
        except ImportError as error:
            raise ConfigError(_missing_package_message("wandb", "wandb", "monitor", error)) from error
        try:
            self.run = wandb.init(project=section.project, group=section.group, entity=section.team)
        except Exception as error:  # wandb raises exceptions of its own: no key, no network, no such team
            raise ConfigError(
                f"wandb.enabled is true but wandb cannot start ({error}): run `wandb login`, set WANDB_MODE=offline, "
                "or set wandb.enabled to false"
            ) from error

    def write(self, events: list[Event]) -> None:
        """Log all metrics of a step together, since W&B's step counter must not decrease."""
        by_step: dict[int, dict[str, float]] = {}
        for name, value, step in events:
            by_step.setdefault(step, {})[name] = value
        for step in sorted(by_step):
            self.run.log(by_step[step], step=step)

    def close(self) -> None:
        """Upload the remaining data."""
        self.run.finish()


class CometWriter:
    """Writer of a Comet experiment, the attribute `experiment`.

    It logs a metric if at least `samples_log_interval` samples have passed since the metric was last logged.

    Raises:
        ConfigError: the package comet_ml is not installed, or it can't start (no key, no network).
    """

    def __init__(self, section: _CometSection) -> None:
        try:
            comet = import_module("comet_ml")
        except ImportError as error:
            raise ConfigError(_missing_package_message("comet", "comet_ml", "comet", error)) from error
        try:
            self.experiment = comet.start(
                api_key=section.api_key,
                project=section.project,
                workspace=section.workspace,
                experiment_key=section.experiment_key,
                mode=section.mode,
                online=section.online,
            )
            if section.experiment_name is not None:
                self.experiment.set_name(section.experiment_name)
        except Exception as error:  # comet_ml raises exceptions of its own: no key, no network, no such experiment
            raise ConfigError(
                f"comet.enabled is true but comet_ml cannot start ({error}): set COMET_API_KEY, write comet.online "
                "false, or set comet.enabled to false"
            ) from error
        self._interval = section.samples_log_interval
        self._logged: dict[str, int] = {}

    def write(self, events: list[Event]) -> None:
        """Log the metrics that are due. The step of an event is its number of samples."""
        for name, value, step in events:
            last = self._logged.get(name)
            if last is None or step - last >= self._interval:
                self._logged[name] = step
                self.experiment.log_metric(name, value, step=step)

    def close(self) -> None:
        """Upload the remaining data."""
        self.experiment.end()


def _start_writer(name: str, make: Callable[[], EventWriter]) -> EventWriter:
    try:
        return make()
    except OSError as error:
        raise ConfigError(f"{name}: cannot start ({error}); change the section {name} of the configuration") from error


def _event_folder(section: _FileMonitorSection, default: str) -> Path:
    return Path(section.output_path or default).expanduser() / section.job_name


def _missing_package_message(section: str, package: str, extra: str, error: ImportError) -> str:
    return (
        f"{section}.enabled is true but the package {package} cannot be imported ({error}): "
        f"pip install 'windlass[{extra}]', or set {section}.enabled to false"
    )


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0") or 0)


def _close(name: str, writer: EventWriter) -> None:
    try:
        writer.close()
    except Exception as error:  # wandb and comet_ml raise exceptions of their own
        logger.error(f"{name}: the last events may be missing ({error})")
