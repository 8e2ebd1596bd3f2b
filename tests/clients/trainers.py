"""Clients built on transformers' Trainer: options that make two runs comparable, and data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.harness import words

STEPS = 4
BATCH = 4

Losses = list[float]


def options(out: Path, ranks: int) -> dict[str, Any]:
    """Return options of the Trainer for a few steps of one batch, for any number of ranks (0: a plain process)."""
    return {
        "output_dir": str(out),
        "per_device_train_batch_size": BATCH // max(ranks, 1),
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "dataloader_num_workers": 0,
    }


def conversations() -> list[tuple[str, str, str]]:
    """Return a question of 4 words, an answer and a rejected answer of 6 words for each row of the steps."""
    return [(words(n, 4), words(n + 3, 6), words(n + 9, 6)) for n in range(STEPS * BATCH)]


class Comparison:
    """Losses of a client's runs. The plain runs are made once.

    Args:
        run: function (case, configuration, ranks) that trains; configuration None and ranks 0: without DeepSpeed.
    """

    def __init__(self, run: Callable[[str, str | None, int], Losses]) -> None:
        self.run = run
        self.plain = functools.cache(lambda name: run(name, None, 0))

    def check(self, name: str, config: str, ranks: int) -> None:
        """Compare the losses of both runs to four decimals.

        Raises:
            AssertionError: the losses differ, or two consecutive plain losses are equal.
        """
        expected, actual = self.plain(name), self.run(name, config, ranks)
        print(f"{name} {config} on {ranks}: {actual}, plainly {expected}")
        assert len(expected) == STEPS
        assert all(abs(item - other) > 1e-3 for item, other in zip(expected, expected[1:], strict=False)), expected
        assert actual == pytest.approx(expected, abs=1.01e-4)
