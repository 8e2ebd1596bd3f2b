"""Tests that a parameter without gradient on all ranks is not updated, as in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests import oracle
from tests.dist.equivalence_runs import Setting, ds_config, specimen, start, whole_params
from tests.dist.harness import run_ranks
from tests.models import Place
from tests.oracle import Recipe, relative_error

DECAYING = (("lr", 1e-2), ("weight_decay", 0.5))


def stepped(name: str, recipe: Recipe, setting: Setting) -> list[dict[str, Any]]:
    subject = specimen(name)
    engine = start(subject, ds_config(recipe, setting))
    snapshots = []
    for step in range(recipe.steps):
        for micro in range(recipe.accumulation):
            subject.train(engine, subject.batch(Place(step, micro, dist.get_rank())), engine.backward)
            engine.step()
        snapshots.append(whole_params(engine.module))
    engine.destroy()
    return snapshots


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_an_unused_parameter_is_not_decayed(optimizer: str, stage: int, transport: str) -> None:
    params = DECAYING if optimizer == "AdamW" else (*DECAYING, ("momentum", 0.9))
    recipe = Recipe(ranks=2, steps=2, optimizer=optimizer, optimizer_params=params)
    before = dict(oracle.build(specimen("unused_always"), 0).named_parameters())
    result = run_ranks(
        stepped, 2, "unused_always", recipe, Setting(stage=stage, transport=transport), transport=transport
    )
    for snapshots in result:
        for name, value in snapshots[-1].items():
            unused = name.startswith(("blocks.1.", "forgotten."))
            assert bool((value == before[name]).all()) == unused, name


@pytest.mark.parametrize("name", ["unused_by_step", "unused_by_micro"])
def test_momentum_and_step_count_of_an_unused_parameter_are_unchanged(name: str, stage: int) -> None:
    """AdamW has a step count per parameter: bias correction of a branch that is first used later starts at step 1."""
    recipe = Recipe(ranks=2, accumulation=2, steps=5, optimizer="AdamW", optimizer_params=DECAYING)
    expected = oracle.train(specimen(name), recipe)
    for snapshots in run_ranks(stepped, 2, name, recipe, Setting(stage=stage)):
        error, where = relative_error(snapshots[-1], expected.params)
        assert error < 1e-6, where


def divergent(stage: int, transport: str) -> list[dict[str, Any]]:
    recipe = Recipe(ranks=2, steps=5)
    return stepped("unused_by_rank", recipe, Setting(stage=stage, transport=transport))


def test_ranks_can_run_different_modules(stage: int, transport: str) -> None:
    """Ranks may run different modules. More cases are in test_uneven_ranks.py."""
    expected = oracle.train(specimen("unused_by_rank"), Recipe(ranks=2, steps=5))
    for snapshots in run_ranks(divergent, 2, stage, transport, transport=transport):
        error, where = relative_error(snapshots[-1], expected.params)
        assert error < 1e-6, where
