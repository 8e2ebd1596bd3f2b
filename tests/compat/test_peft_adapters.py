"""Tests that LoRA adapters of peft train under DeepSpeed as without it, and are saved equally."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.compat.client_configs import config
from tests.compat.conftest import require_package, start

require_package("peft")

_VARIANTS = ("lora", "modules", "tied", "tokens", "dora")


def _by_hand(stage: int) -> dict[str, Any]:
    section = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    return {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "zero_optimization": section}


def _case(variant: str, route: str, stage: int, sharded_init: bool) -> dict[str, Any]:
    made = config(stage) if route == "trainer" else _by_hand(stage)
    return {"variant": variant, "route": route, "config": made, "sharded_init": sharded_init}


# The variant `tokens` has no case under zero.Init: there peft 0.21 calls torch.cuda on any machine.
_CASES: dict[str, dict[str, Any]] = {
    f"{variant}-{route}-{stage}{'-sharded-init' if sharded_init else ''}": _case(variant, route, stage, sharded_init)
    for variant in _VARIANTS
    for route in ("trainer", "engine")
    for stage, sharded_init in ((2, False), (3, False), (3, True))
    if not (variant == "tokens" and sharded_init)
}
_QUICK = (
    "lora-trainer-3",
    "lora-engine-2",
    "modules-trainer-3-sharded-init",
    "modules-engine-3",
    "tied-trainer-3",
    "tokens-engine-3",
    "dora-trainer-3-sharded-init",
)
Told = dict[str, dict[str, Any]]
Ask = Callable[[int, bool], Told]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Return the results of the cases, all or the quick ones: on 0 ranks without DeepSpeed, on 1 and 2 with it."""
    from transformers import LlamaForCausalLM

    from tests.compat.scripts import transformers_training

    out = tmp_path_factory.mktemp("adapters")
    for tied in (True, False):
        torch.manual_seed(0)
        shape = transformers_training.model_config()
        shape.tie_word_embeddings = tied
        LlamaForCausalLM(shape).save_pretrained(out / ("tied" if tied else "untied"))
    results: dict[tuple[int, bool], Told] = {}

    def get(ranks: int, every: bool) -> Told:
        if (ranks, every) not in results:
            chosen = {name: case for name, case in _CASES.items() if every or name in _QUICK}
            if ranks == 0:
                both = [(variant, route) for variant in _VARIANTS for route in ("trainer", "engine")]
                chosen = {f"{variant}-{route}-plain": {"variant": variant, "route": route} for variant, route in both}
            cases = [{"name": name, "ranks": max(ranks, 1), **case} for name, case in chosen.items()]
            (out / "cases.json").write_text(json.dumps(cases))
            start("peft_training.py", out, out / "cases.json", ranks=ranks, stands_in=ranks > 0, seconds=600)
            file = out / f"results-{max(ranks, 1)}{'' if ranks else '-plain'}.json"
            results[ranks, every] = json.loads(file.read_text())
        return results[ranks, every]

    return get


def _holds(plain: dict[str, Any], one: dict[str, Any]) -> None:
    assert one["losses"] == pytest.approx(plain["losses"], abs=2e-6)
    assert one["moved"] > 0.05  # the adapter has changed, so that an empty one would be noticed
    assert one["equal"], "the saved adapter computes other logits than the engine that saved it"
    assert one["bytes"] <= plain["bytes"]


@pytest.mark.parametrize("name", _QUICK)
def test_adapters_train_and_are_saved_over_two_ranks(results_of: Ask, name: str) -> None:
    """Losses equal those without DeepSpeed, and the saved adapter on the plain base has bitwise the engine's logits.

    The file is not larger than without DeepSpeed, so it has no base weights.
    """
    _holds(_plain_of(results_of, name), results_of(2, False)[name])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", _CASES)
def test_adapters_train_and_are_saved(results_of: Ask, name: str, ranks: int) -> None:
    """All cases have the losses of a run without DeepSpeed and save the engine's adapter."""
    _holds(_plain_of(results_of, name), results_of(ranks, True)[name])


def _plain_of(results_of: Ask, name: str) -> dict[str, Any]:
    variant, route = name.split("-")[:2]
    return results_of(0, True)[f"{variant}-{route}-plain"]
