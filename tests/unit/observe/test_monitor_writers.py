"""Tests that monitors write each event once, on rank 0, and never stop the training."""

from __future__ import annotations

import csv
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from windlass.base.errors import ConfigError
from windlass.base.log import logger
from windlass.config.monitor_section import Comet
from windlass.observe.monitor_writers import CsvWriter, RunMonitor


def sections(tmp_path: Path, *enabled: str) -> Any:
    files = {"output_path": str(tmp_path), "job_name": "job"}
    return SimpleNamespace(
        tensorboard=SimpleNamespace(enabled="tensorboard" in enabled, **files),
        csv_monitor=SimpleNamespace(enabled="csv_monitor" in enabled, **files),
        wandb=SimpleNamespace(enabled="wandb" in enabled, group="g", team="t", project="p"),
        comet=Comet(enabled="comet" in enabled, samples_log_interval=10, experiment_name="n", online=False),
    )


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_csv_has_one_file_per_quantity_and_is_appended_by_the_next_run(tmp_path: Path) -> None:
    for steps in ((1, 2), (3,)):
        with RunMonitor(sections(tmp_path, "csv_monitor"), rank=0) as monitor:
            assert monitor.enabled
            for step in steps:
                monitor.write_events([("Train/loss", 0.1 * step, step), ("Train/lr rate", torch.tensor(0.5), step)])
                # each event is flushed at once
                assert rows(tmp_path / "job" / "Train_loss.csv")[-1] == [str(step), str(0.1 * step)]
    assert rows(tmp_path / "job" / "Train_loss.csv") == [
        ["step", "loss"],
        ["1", "0.1"],
        ["2", "0.2"],
        ["3", str(0.1 * 3)],
    ]
    assert rows(tmp_path / "job" / "Train_lr_rate.csv")[0] == ["step", "lr rate"]
    assert len(list((tmp_path / "job").iterdir())) == 2


@pytest.mark.parametrize("rank", [1, 7])
def test_other_ranks_write_nothing_and_import_nothing(tmp_path: Path, rank: int) -> None:
    monitor = RunMonitor(sections(tmp_path, "csv_monitor", "tensorboard", "wandb"), rank=rank)
    monitor.write_events([("loss", 1.0, 1)])
    monitor.close()
    assert not monitor.enabled
    assert list(tmp_path.iterdir()) == []


def test_rank_is_read_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert not RunMonitor(sections(tmp_path, "csv_monitor")).enabled
    monkeypatch.setenv("RANK", "0")
    assert RunMonitor(sections(tmp_path, "csv_monitor")).enabled
    assert not RunMonitor(sections(tmp_path)).enabled


def test_empty_paths_have_default_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = sections(tmp_path, "csv_monitor")
    config.csv_monitor.output_path = ""
    RunMonitor(config, rank=0).write_events([("loss", 1.0, 1)])
    assert (tmp_path / "csv_monitor" / "job" / "loss.csv").exists()


def test_tensorboard_events_can_be_read_back(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monitor = RunMonitor(sections(tmp_path, "tensorboard"), rank=0)
    monitor.write_events([("Train/loss", 2.5, 10), ("Train/loss", 1.5, 20)])
    events = reading.EventAccumulator(str(tmp_path / "job"))
    events.Reload()  # before close: the events are on disk already
    assert [(event.step, event.value) for event in events.Scalars("Train/loss")] == [(10, 2.5), (20, 1.5)]
    monitor.close()
    monitor.close()


class FakeWandb(ModuleType):
    """Fake of `wandb` that records its calls."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.said: list[Any] = []

    def init(self, **keywords: Any) -> FakeWandb:
        self.said.append(keywords)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.said.append((step, values))

    def finish(self) -> None:
        self.said.append("finished")


def test_wandb_gets_one_call_a_step_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with RunMonitor(sections(tmp_path, "wandb"), rank=0) as monitor:
        monitor.write_events([("loss", 1.0, 2), ("loss", 2.0, 1), ("lr", 0.5, 2)])
    assert wandb.said == [
        {"project": "p", "group": "g", "entity": "t"},
        (1, {"loss": 2.0}),
        (2, {"loss": 1.0, "lr": 0.5}),
        "finished",
    ]


class FakeComet(ModuleType):
    """Fake of `comet_ml` that records its calls."""

    def __init__(self) -> None:
        super().__init__("comet_ml")
        self.said: list[Any] = []

    def start(self, **keywords: Any) -> FakeComet:
        self.said.append({key: value for key, value in keywords.items() if value is not None})
        return self

    def set_name(self, name: str) -> None:
        self.said.append(name)

    def log_metric(self, name: str, value: float, step: int) -> None:
        self.said.append((name, value, step))

    def end(self) -> None:
        self.said.append("ended")


def test_comet_logs_each_quantity_at_the_interval_of_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comet = FakeComet()
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    with RunMonitor(sections(tmp_path, "comet"), rank=0) as monitor:
        for samples in (4, 8, 12, 16, 20, 24):
            monitor.write_events([("loss", 1.0 / samples, samples), *([("lr", 0.5, 8)] if samples == 8 else [])])
    assert comet.said == [
        {"online": False}, "n",
        ("loss", 0.25, 4), ("lr", 0.5, 8), ("loss", 1.0 / 16, 16), "ended",
    ]  # fmt: skip


def test_comet_failure_at_start_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comet = FakeComet()

    def refuse(**_: Any) -> None:
        raise RuntimeError("no API key")

    monkeypatch.setattr(comet, "start", refuse)
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    with pytest.raises(ConfigError, match=r"comet.enabled.*no API key.*COMET_API_KEY"):
        RunMonitor(sections(tmp_path, "comet"), rank=0)


EXTRAS = [
    ("tensorboard", "torch.utils.tensorboard", "monitor"),
    ("wandb", "wandb", "monitor"),
    ("comet", "comet_ml", "comet"),
]


@pytest.mark.parametrize(("section", "module", "extra"), EXTRAS)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        RunMonitor(sections(tmp_path, section), rank=0)
    assert f"{section}.enabled" in str(caught.value) and f"pip install 'windlass[{extra}]'" in str(caught.value)


def test_uncreatable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("a file in the way")
    with pytest.raises(ConfigError, match="csv_monitor: cannot start"):
        RunMonitor(sections(tmp_path, "csv_monitor"), rank=0)


def test_failing_writer_is_dropped_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monitor = RunMonitor(sections(tmp_path, "csv_monitor", "wandb"), rank=0)

    def full(self: CsvWriter, events: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CsvWriter, "write", full)
    closed: list[CsvWriter] = []
    monkeypatch.setattr(CsvWriter, "close", lambda self: closed.append(self))
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Handler()
    logger.addHandler(handler)
    try:
        for step in (1, 2):
            monitor.write_events([("loss", 1.0, step)])
    finally:
        logger.removeHandler(handler)
    assert len(lines) == 1 and "csv_monitor" in lines[0] and "No space left" in lines[0]
    assert len(closed) == 1
    assert [entry[0] for entry in wandb.said if isinstance(entry, tuple)] == [1, 2]


def test_error_of_a_package_stops_neither_events_nor_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ServiceGoneError(Exception):
        pass

    def gone(*_: object, **__: object) -> None:
        raise ServiceGoneError("the service went away")

    for closes_only in (False, True):
        wandb = FakeWandb()
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        monitor = RunMonitor(sections(tmp_path, "csv_monitor", "wandb"), rank=0)
        monkeypatch.setattr(monitor._writers["wandb"], "close" if closes_only else "write", gone)
        monitor.write_events([("loss", 1.0, 1)])
        assert ("wandb" in monitor._writers) == closes_only and "csv_monitor" in monitor._writers
        monitor.close()


def test_wandb_failure_at_start_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()

    def refuse(**settings: object) -> None:
        raise RuntimeError("api_key not configured")

    monkeypatch.setattr(wandb, "init", refuse)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(ConfigError, match=r"api_key not configured.*WANDB_MODE=offline"):
        RunMonitor(sections(tmp_path, "wandb"), rank=0)
