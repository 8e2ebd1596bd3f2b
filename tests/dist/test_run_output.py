"""Tests of the output of a run: monitors on rank 0, and few log lines."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.dist.equivalence_runs import Setting, ds_config, specimen, start
from tests.dist.harness import run_ranks
from tests.models import Place
from tests.oracle import Recipe

STEPS = 4


def monitored(folder: str) -> dict[str, list[float]]:
    subject, rank = specimen("mlp"), dist.get_rank()
    config: dict[str, Any] = {
        **ds_config(Recipe(accumulation=2), Setting(stage=2)),
        "steps_per_print": 1,
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"},
        "tensorboard": {"enabled": True, "output_path": folder + "/events", "job_name": "job"},
    }
    engine = start(subject, config)
    seen: dict[str, list[float]] = {"lr": [], "norm": [], "loss": []}
    for step in range(STEPS):
        micro_losses = []
        for micro in range(2):
            batch = subject.batch(Place(step, micro, rank))
            micro_losses.append(float(subject.train(engine, batch, engine.backward)))
            rate = engine.get_lr()[0]
            engine.step()
        seen["lr"].append(rate)
        seen["norm"].append(engine.grad_norm())
        seen["loss"].append(sum(micro_losses) / 2)
    engine.destroy()
    return seen


def rows(path: Path) -> list[float]:
    """Return the values of a CSV file of `step, value` rows with one header line."""
    with path.open() as file:
        return [float(row[1]) for row in list(csv.reader(file))[1:]]


def test_monitors_write_the_engine_values(tmp_path: Path) -> None:
    result = run_ranks(monitored, 2, str(tmp_path))
    files = {path.stem.lower(): rows(path) for path in tmp_path.rglob("*.csv")}
    assert all(len(values) == STEPS for values in files.values()), files
    by_word = {word: [values for name, values in files.items() if word in name] for word in ("lr", "norm", "loss")}
    assert by_word["lr"] and by_word["lr"][0] == pytest.approx(result[0]["lr"])
    assert by_word["norm"] and by_word["norm"][0] == pytest.approx(result[0]["norm"])
    # the mean loss of the step's micro-batches, on rank 0
    assert by_word["loss"] and by_word["loss"][0] == pytest.approx(result[0]["loss"])
    assert result[0]["loss"] != pytest.approx(result[1]["loss"])
    assert list(tmp_path.rglob("events.out.tfevents*"))


class Lines(logging.Handler):
    """Handler that collects the lines that are logged at the default level."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


def printed() -> list[str]:
    """Run a few steps under a default configuration. Return the lines that this rank logs."""
    subject, logger = specimen("mlp"), logging.getLogger("windlass")
    lines = Lines()
    lines.addFilter(lambda record: all(handler.filter(record) for handler in logger.handlers[:1]))
    logger.addHandler(lines)
    try:
        engine = start(subject, ds_config(Recipe(), Setting(stage=3)))
        for step in range(5):
            subject.train(engine, subject.batch(Place(step, 0, dist.get_rank())), engine.backward)
            engine.step()
        engine.destroy()
    finally:
        logger.removeHandler(lines)
    return lines.lines


def test_a_run_prints_at_most_twenty_lines_on_rank_0() -> None:
    first, second = run_ranks(printed, 2, transport="shm")
    assert 1 <= len(first) <= 20, "\n".join(first)
    assert any("shm" in line for line in first), "the transport and why are told first"
    assert any("fp32" in line for line in first), "so is the table of dtypes"
    assert not second, second
