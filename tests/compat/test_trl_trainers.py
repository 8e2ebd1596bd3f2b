"""Tests that the trainers of trl under DeepSpeed configurations train as they do without DeepSpeed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.compat.client_configs import config
from tests.compat.conftest import require_package, start

require_package("trl")

_KINDS: dict[str, dict[str, Any]] = {
    "sft": {"kind": "sft"},
    "sft-lora": {"kind": "sft", "lora": True},
    "dpo": {"kind": "dpo", "options": {"reference": True}},
    "dpo-before": {"kind": "dpo", "options": {"precompute_ref_log_probs": True}},
    "dpo-lora": {"kind": "dpo", "lora": True},
    "grpo": {"kind": "grpo", "options": {"beta": 0.1}},
    "grpo-lora": {"kind": "grpo", "lora": True, "options": {"beta": 0.1}},
}
_CASES: dict[str, dict[str, Any]] = {
    f"{name}-{stage}{'-sharded-init' if sharded_init else ''}": {
        **kind,
        "config": config(stage),
        "sharded_init": sharded_init,
    }
    for name, kind in _KINDS.items()
    for stage, sharded_init in ((2, False), (3, False), (3, True))
}
_QUICK = (
    "sft-3-sharded-init",
    "sft-lora-3",
    "dpo-3",
    "dpo-before-3-sharded-init",
    "grpo-2",
    "grpo-3",
)
Told = dict[str, dict[str, Any]]
Ask = Callable[[int, bool, bool], Told]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Return the results of the cases, all or the quick ones, by number of ranks, with or without DeepSpeed.

    Without DeepSpeed two ranks use DDP. The text that GRPO generates depends on the rank, so it is compared with a run
    on the same number of ranks.
    """
    from tests.compat.scripts import trl_training

    out = tmp_path_factory.mktemp("preferences")
    trl_training.write(out)
    results: dict[tuple[int, bool, bool], Told] = {}

    def get(ranks: int, plain: bool, every: bool) -> Told:
        if (ranks, plain, every) not in results:
            chosen = _CASES if not plain else _KINDS
            chosen = {name: case for name, case in chosen.items() if every or name in _QUICK or _has_quick(name)}
            cases = [{"name": name, "ranks": ranks, **case} for name, case in chosen.items()]
            (out / "cases.json").write_text(json.dumps(cases))
            launched = 0 if plain and ranks == 1 else ranks
            start("trl_training.py", out, out / "cases.json", ranks=launched, stands_in=not plain, seconds=600)
            results[ranks, plain, every] = json.loads(
                (out / f"results-{ranks}{'-plain' if plain else ''}.json").read_text()
            )
        return results[ranks, plain, every]

    return get


def _has_quick(kind: str) -> bool:
    return any(_kind_of(name) == kind for name in _QUICK)


def _kind_of(name: str) -> str:
    return name.removesuffix("-sharded-init").rpartition("-")[0]


def _holds(results_of: Ask, name: str, ranks: int, every: bool) -> None:
    plain, item = results_of(ranks, True, every)[_kind_of(name)], results_of(ranks, False, every)[name]
    keys = {key for key, values in plain.items() if values}
    assert {"loss", "grad_norm"} < keys
    for key in keys:
        assert item[key] == pytest.approx(plain[key], abs=2e-6), key
    if _CASES[name]["config"]["zero_optimization"]["stage"] == 3:
        assert item["hooks"] == [1, 1]  # GRPO's trainer removed the hooks to generate, and restored them


@pytest.mark.parametrize("name", _QUICK)
def test_trainers_over_two_ranks(results_of: Ask, name: str) -> None:
    """Losses, gradient norms, rewards and divergences equal those of the same trainer without DeepSpeed."""
    _holds(results_of, name, 2, False)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", _CASES)
def test_trainers(results_of: Ask, name: str, ranks: int) -> None:
    """Every case equals the same trainer without DeepSpeed."""
    _holds(results_of, name, ranks, True)
