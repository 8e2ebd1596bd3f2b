"""Tests that lightning's DeepSpeed strategy trains as plain lightning, as far as it can run on CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compat.conftest import require_package, start

require_package("lightning")

_AIO = {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True, "strange": 2}


def _config(stage: int, **others: Any) -> dict[str, Any]:
    return {
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "aio": _AIO,
        **others,
    }


_ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}}
_FILES = {"format": "deepspeed"}
_CASES: dict[str, dict[str, Any]] = {
    **{f"stage-{stage}": {"stage": stage, "like": "resumed", "resume": True} for stage in (1, 2, 3)},
    "sharded": {"stage": 3, "like": "resumed", "sharded": True, "resume": True},
    "accumulated": {"stage": 2, "like": "accumulated", "accumulation": 2},
    "host": {"stage": 3, "like": "plain", "options": {"offload_optimizer": True, "offload_parameters": True}},
    "configured": {"stage": 2, "like": "constant", "scheduled": False, "config": _config(2, optimizer=_ADAMW)},
    **{
        f"files-{stage}": {
            "stage": stage,
            "like": "resumed",
            "resume": True,
            "config": _config(stage, checkpoint=_FILES),
        }
        for stage in (2, 3)
    },
}
_PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "resumed": {"resume": True},
    # Under DeepSpeed, lightning and the engine's backward both divide the loss by the number of micro-batches. With
    # half of the gradients and a clipping norm of 1, Adam takes the steps of plain lightning with a norm of 2.
    "accumulated": {"accumulation": 2, "clip": 2.0},
    "constant": {"scheduled": False},
}
# The cases of `make test`, on two ranks. The others differ in their stage, or are cases of test_transformers_trainer.
_QUICK = ("stage-3", "sharded", "accumulated", "configured", "files-2")
Told = dict[str, dict[str, Any]]


def _rows(names: list[str]) -> list[Any]:
    return [
        pytest.param(name, ranks, marks=() if ranks == 2 and name in _QUICK else pytest.mark.slow)
        for ranks in (1, 2)
        for name in names
    ]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Told]:
    """Return the results of the quick or the slow cases: on 0 ranks plain lightning, on others DeepSpeed's strategy."""
    out = tmp_path_factory.mktemp("lightning")
    results: dict[tuple[int, bool], Told] = {}

    def get(ranks: int, quick: bool = True) -> Told:
        if (ranks, quick) not in results:
            chosen = {name: case for name, case in _CASES.items() if (name in _QUICK) is quick} if ranks else _PLAIN
            cases = [
                {"name": name, "ranks": max(ranks, 1), **{key: value for key, value in case.items() if key != "like"}}
                for name, case in chosen.items()
            ]
            (out / f"cases-{ranks}.json").write_text(json.dumps(cases))
            start("lightning_training.py", out, out / f"cases-{ranks}.json", ranks=ranks, stands_in=ranks > 0)
            text = (out / f"results-{max(ranks, 1)}{'' if ranks else '-plain'}.json").read_text()
            results[ranks, quick] = json.loads(text)
            for name, item in results[ranks, quick].items():
                item["folder"] = out / f"{name}-{max(ranks, 1)}"
        return results[ranks, quick]

    return get


@pytest.mark.parametrize(("name", "ranks"), _rows(list(_CASES)))
def test_losses_equal_plain_lightning(results_of: Callable[..., Told], name: str, ranks: int) -> None:
    """Losses of training (also after a resume in a new Trainer) and validation, and rates, equal plain lightning's."""
    plain, item = results_of(0)[_CASES[name]["like"]], results_of(ranks, name in _QUICK)[name]
    assert item["engine"] == "windlass.compat.deepspeed_engine"
    assert item["losses"] == pytest.approx(plain["losses"], abs=2e-6)
    assert item["validated"] == pytest.approx(plain["validated"], abs=2e-6)
    assert item["rates"] == pytest.approx(plain["rates"])
    assert item.get("steps") == plain.get("steps")


@pytest.mark.parametrize(("name", "ranks"), _rows(["files-2", "files-3"]))
def test_lightning_tool_reads_the_files(results_of: Callable[..., Told], name: str, ranks: int) -> None:
    """lightning's tool converts files in DeepSpeed's format into one with plain lightning's weights, step and epoch."""
    expected = _loaded(results_of(0)["resumed"]["folder"] / "half.ckpt")
    actual = _loaded(results_of(ranks, name in _QUICK)[name]["folder"] / "whole.ckpt")
    for name, value in expected["state_dict"].items():
        torch.testing.assert_close(actual["state_dict"][name], value, atol=2e-6, rtol=1e-5)
    assert actual["global_step"] == expected["global_step"] == 2
    assert actual["epoch"] == expected["epoch"]


def _loaded(path: Path) -> dict[str, Any]:
    full: dict[str, Any] = torch.load(path, weights_only=False)
    return full
