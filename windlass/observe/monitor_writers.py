"""Writes a run's numbers to TensorBoard, CSV files, Weights & Biases and Comet, from rank 0."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, SupportsFloat

import torch

from windlass.base.errors import ConfigError
from windlass.base.log import logger

Event = tuple[str, float, int]
"""Name of a quantity (`Train/loss`), its value, and the step it belongs to."""


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
    """The sections of the configuration that are read."""

    @property
    def tensorboard(self) -> _FileMonitorSection: ...
    @property
    def csv_monitor(self) -> _FileMonitorSection: ...
    @property
    def wandb(self) -> _WandbSection: ...
    @property
    def comet(self) -> _CometSection: ...


class EventWriter(Protocol):
    """One place that events go to."""

    def write(self, events: list[Event]) -> None:
        """Write and flush."""

    def close(self) -> None:
        """Finish; nothing is written after."""


class RunMonitor:
    """Every writer that the configuration turns on; none on ranks other than 0.

    Each `write_events` is flushed before it returns, so an interrupt loses at most the events in hand. A writer that
    fails (disk full, network) is dropped with an error in the log and training goes on.

    Args:
        config: with sections `tensorboard`, `csv_monitor`, `wandb`, `comet`.
        rank: this process; by default torch.distributed's, else the environment's RANK, else 0.

    Raises:
        ConfigError: a section is enabled whose package is not installed, or whose folder cannot be made.
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
        """Whether anything is written; a loop may skip computing events otherwise."""
        return bool(self._writers)

    def write_events(self, events: Iterable[tuple[str, SupportsFloat, int]]) -> None:
        """Write `(name, value, step)` triples everywhere; a value may be a one-element tensor."""
        if not self._writers:
            return
        plain = [(name, float(value), int(step)) for name, value, step in events]
        for name, writer in list(self._writers.items()):
            try:
                writer.write(plain)
            except OSError as error:
                logger.error(f"{name}: cannot write ({error}); nothing more is written there in this run")
                del self._writers[name]

    def close(self) -> None:
        """Close every writer; safe to call twice."""
        while self._writers:
            name, writer = self._writers.popitem()
            try:
                writer.close()
            except OSError as error:
                logger.error(f"{name}: the last events may be missing ({error})")

    def __enter__(self) -> RunMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class CsvWriter:
    """One file a quantity, `Train_loss.csv` for `Train/loss`, of `step,loss` rows; an existing file is continued."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, events: list[Event]) -> None:
        """Append one row an event; quantities written together open each file once."""
        by_name: dict[str, list[tuple[int, float]]] = {}
        for name, value, step in events:
            by_name.setdefault(name, []).append((step, value))
        for name, rows in by_name.items():
            path = self.folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with path.open("a", newline="") as file:  # closed after each write: a row never waits in a buffer
                writer = csv.writer(file, lineterminator="\n")
                if file.tell() == 0:
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerows(rows)

    def close(self) -> None:
        """Nothing: no file is open."""


class TensorBoardWriter:
    """Event files in a folder, by torch's SummaryWriter.

    Raises:
        ConfigError: the package tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(_missing_package_message("tensorboard", "tensorboard", "monitor", error)) from error
        make: Callable[..., Any] = SummaryWriter
        self._writer = make(log_dir=str(folder))

    def write(self, events: list[Event]) -> None:
        """Add scalars and flush."""
        for name, value, step in events:
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Finish the event file."""
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases.

    Raises:
        ConfigError: the package wandb is not installed, or it cannot start (no key, no network).
    """

    def __init__(self, section: _WandbSection) -> None:
        try:
            wandb = import_module("wandb")
        except ImportError as error:
            raise ConfigError(_missing_package_message("wandb", "wandb", "monitor", error)) from error
        try:
            self._run = wandb.init(project=section.project, group=section.group, entity=section.team)
        except Exception as error:  # wandb has kinds of its own: no key, no network, no such team
            raise ConfigError(
                f"wandb.enabled is true but wandb cannot start ({error}): run `wandb login`, set WANDB_MODE=offline, "
                "or set wandb.enabled to false"
            ) from error

    def write(self, events: list[Event]) -> None:
        """Log all quantities of a step together, as W&B's own step counter never goes back."""
        by_step: dict[int, dict[str, float]] = {}
        for name, value, step in events:
            by_step.setdefault(step, {})[name] = value
        for step in sorted(by_step):
            self._run.log(by_step[step], step=step)

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


class CometWriter:
    """An experiment of Comet. A quantity is logged when `samples_log_interval` samples have passed since the last time.

    Raises:
        ConfigError: the package comet_ml is not installed, or it cannot start (no key, no network).
    """

    def __init__(self, section: _CometSection) -> None:
        try:
            comet = import_module("comet_ml")
        except ImportError as error:
            raise ConfigError(_missing_package_message("comet", "comet_ml", "comet", error)) from error
        try:
            self._experiment = comet.start(
                api_key=section.api_key,
                project=section.project,
                workspace=section.workspace,
                experiment_key=section.experiment_key,
                mode=section.mode,
                online=section.online,
            )
            if section.experiment_name is not None:
                self._experiment.set_name(section.experiment_name)
        except Exception as error:  # comet_ml has kinds of its own: no key, no network, no such experiment
            raise ConfigError(
                f"comet.enabled is true but comet_ml cannot start ({error}): set COMET_API_KEY, write comet.online "
                "false, or set comet.enabled to false"
            ) from error
        self._interval = section.samples_log_interval
        self._logged: dict[str, int] = {}

    def write(self, events: list[Event]) -> None:
        """Log what is due; the step of an event is its number of samples."""
        for name, value, step in events:
            last = self._logged.get(name)
            if last is None or step - last >= self._interval:
                self._logged[name] = step
                self._experiment.log_metric(name, value, step=step)

    def close(self) -> None:
        """Upload what is left."""
        self._experiment.end()


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
