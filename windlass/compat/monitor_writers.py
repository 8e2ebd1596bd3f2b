"""Module `deepspeed.monitor`: writes a script's own metrics with windlass's monitor, as the configuration specifies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, SupportsFloat

from windlass.compat.tolerated_keys import resolve_tolerated_keys
from windlass.config import load_config
from windlass.observe import monitor_writers

_DISABLED_SECTION = SimpleNamespace(enabled=False)


class DeepSpeedMonitorConfig:
    """Sections of a configuration that enable monitors.

    Raises:
        ConfigError: a section is invalid.
    """

    def __init__(self, tensorboard: Any = None, comet: Any = None, wandb: Any = None, csv_monitor: Any = None) -> None:
        given = {"tensorboard": tensorboard, "comet": comet, "wandb": wandb, "csv_monitor": csv_monitor}
        config = load_config({name: value for name, value in given.items() if value})
        self.tensorboard, self.wandb, self.csv_monitor = config.tensorboard, config.wandb, config.csv_monitor
        self.comet = config.comet

    @property
    def enabled(self) -> bool:
        """True if any monitor is enabled."""
        return self.tensorboard.enabled or self.wandb.enabled or self.csv_monitor.enabled or self.comet.enabled


def get_monitor_config(param_dict: Any) -> DeepSpeedMonitorConfig:
    """Return the monitor sections of a configuration, which is a dict, a path or base64.

    Raises:
        ConfigError: the configuration is invalid.
    """
    config = load_config(resolve_tolerated_keys(param_dict))
    sections = ("tensorboard", "comet", "wandb", "csv_monitor")
    return DeepSpeedMonitorConfig(**{name: getattr(config, name).model_dump(exclude_unset=True) for name in sections})


class Monitor(ABC):
    """Base class of metric writers."""

    @abstractmethod
    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config

    @abstractmethod
    def write_events(self, event_list: Iterable[tuple[str, SupportsFloat, int]]) -> None:
        """Write `(name, value, step)` triples; ranks other than 0 write nothing."""


class MonitorMaster(Monitor):
    """Writer to all monitors that a `DeepSpeedMonitorConfig`, or `DeepSpeedConfig.monitor_config`, enables."""

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        self.enabled: bool = monitor_config.enabled
        self._monitor = monitor_writers.RunMonitor(monitor_config)

    def write_events(self, event_list: Iterable[tuple[str, SupportsFloat, int]]) -> None:
        self._monitor.write_events(event_list)


class _SingleWriterMonitor(Monitor):
    """Writer to one monitor. The settings of its section are its attributes (`output_path`, `project`, ...)."""

    _section: str

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        self.enabled: bool = monitor_config.enabled
        for name in type(monitor_config).model_fields:
            setattr(self, name, getattr(monitor_config, name))
        off = dict.fromkeys(("tensorboard", "csv_monitor", "wandb", "comet"), _DISABLED_SECTION)
        sections = {**off, self._section: monitor_config}
        self._monitor = monitor_writers.RunMonitor(SimpleNamespace(**sections))

    def _from_writer(self, name: str) -> Any:
        """Return an attribute of the writer; None if this rank does not write."""
        return getattr(self._monitor.writer(self._section), name, None)

    def write_events(self, event_list: Iterable[tuple[str, SupportsFloat, int]]) -> None:
        self._monitor.write_events(event_list)


class TensorBoardMonitor(_SingleWriterMonitor):
    """Writer of TensorBoard event files."""

    _section = "tensorboard"

    def __init__(self, tensorboard_config: Any) -> None:
        super().__init__(tensorboard_config)
        self.summary_writer = self._from_writer("summary_writer")

    def get_summary_writer(self, base: Any = None) -> Any:
        """Return the SummaryWriter; None if this monitor is disabled or the rank is not 0. `base` is ignored."""
        return self.summary_writer

    def write_events(self, event_list: Iterable[tuple[str, SupportsFloat, int]], flush: bool = True) -> None:
        """Write the events. They are flushed at once, whatever `flush` is."""
        super().write_events(event_list)

    def flush(self) -> None:
        """Flush values that a script added to the SummaryWriter."""
        if self.summary_writer is not None:
            self.summary_writer.flush()


class csvMonitor(_SingleWriterMonitor):
    """Writer of CSV files."""

    _section = "csv_monitor"

    def __init__(self, csv_config: Any) -> None:
        super().__init__(csv_config)


class WandbMonitor(_SingleWriterMonitor):
    """Writer to Weights & Biases."""

    _section = "wandb"

    def __init__(self, wandb_config: Any) -> None:
        super().__init__(wandb_config)
        self._run = self._from_writer("run")

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """Log values to the run, as `wandb.log` does."""
        if self._run is not None:
            self._run.log(data, step=step, commit=commit)


class CometMonitor(_SingleWriterMonitor):
    """Writer to Comet."""

    _section = "comet"

    def __init__(self, comet_config: Any) -> None:
        super().__init__(comet_config)
        self.experiment = self._from_writer("experiment")
