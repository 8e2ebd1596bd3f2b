"""Tests of the record of a run whose model is distributed over the ranks of several axes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import windlass
from tests.dist.harness import run_ranks
from tests.dist.parallel_runs import build


def _record(kind: str, tied: bool, parallel: dict[str, int], stage: int, folder: Path) -> tuple[int, int]:
    """Start a run, which writes its record. Return the numbers of all and of trained elements of the full model."""
    model: Any = build(kind, tied=tied)
    model.get_input_embeddings().requires_grad_(tied)
    numbers = [sum(p.numel() for p in model.parameters() if p.requires_grad >= trained) for trained in (0, 1)]
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW"},
        "parallel": parallel,
        "zero_optimization": {"stage": stage},
        "jsonl_monitor": {"enabled": True, "output_path": str(folder), "job_name": "run"},
    }
    windlass.initialize(model=model, config=config)[0].destroy()
    return numbers[0], numbers[1]


@pytest.mark.parametrize(
    ("kind", "tied", "parallel", "ranks", "stage"),
    [
        ("llama", True, {"pp": 2, "tp": 2}, 4, 1),
        pytest.param("llama", False, {"pp": 2}, 2, 0, marks=pytest.mark.slow),
        pytest.param("mixtral", False, {"ep": 2}, 2, 3, marks=pytest.mark.slow),
        pytest.param("uneven", False, {"sp": 2}, 4, 3, marks=pytest.mark.slow),
    ],
)
def test_the_record_counts_the_parameters_of_the_whole_model(
    kind: str, tied: bool, parallel: dict[str, int], ranks: int, stage: int, tmp_path: Path
) -> None:
    (numbers, *_) = run_ranks(_record, ranks, kind, tied, parallel, stage, tmp_path)
    (path,) = tmp_path.rglob("*.jsonl")
    start = json.loads(path.read_text("utf-8").splitlines()[0])
    assert (start["parameters"], start["trained"]) == numbers
