"""Tests of the masks of momenta (`exp_avg_mask`) of 1-bit Adam, 0/1 Adam and 1-bit LAMB."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import windlass
from tests import oracle
from tests.dist import test_one_bit_adam, test_one_bit_lamb, test_zero_one_adam
from tests.dist.equivalence_runs import specimen
from tests.dist.harness import run_ranks
from tests.dist.test_one_bit_adam import Case, begin, train
from windlass.base.errors import ConfigError
from windlass.parallel.placement import Placement
from windlass.zero.update.momentum_mask import apply_momentum_mask

MASKED = "blocks.0.up.weight"
LAWS: dict[str, tuple[Any, Any]] = {
    "OneBitAdam": (test_one_bit_adam.run_case, test_one_bit_adam.require_law),
    "ZeroOneAdam": (test_one_bit_adam.run_case, test_zero_one_adam.require_law),
    "OneBitLamb": (test_one_bit_lamb.run_lamb, test_one_bit_lamb.require_law),
}
CASES = {"OneBitAdam": Case(), "ZeroOneAdam": test_zero_one_adam.CASE, "OneBitLamb": test_one_bit_lamb.CASE}


def run_all(cases: list[Case], folder: str) -> list[dict[str, Any]]:
    return [LAWS[case.optimizer][0](case, folder) for case in cases]


@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_masked_steps_equal_their_simulation(stage: int, tmp_path: Path) -> None:
    masked = [replace(case, masked=MASKED, stage=stage) for case in CASES.values()]
    free = [replace(case, masked="") for case in masked]
    by_rank = run_ranks(run_all, 2, [*masked, *free], str(tmp_path), timeout=120.0)
    for number, case in enumerate(masked):
        results = [found[number] for found in by_rank]
        LAWS[case.optimizer][1](case, results)
        other = by_rank[0][number + len(masked)]["params"][MASKED]
        assert not torch.equal(results[0]["params"][MASKED], other), "the mask changes nothing"


def resume_with(case: Case, folder: str) -> list[torch.Tensor]:
    """Return the mask and the masked momentum of a run that saves, and of a run with another mask that resumes."""
    found = []
    for inverted in (False, True):
        engine = begin(case, folder)
        group = engine.optimizer.param_groups[1]
        if inverted:
            group["exp_avg_mask"] = 1 - group["exp_avg_mask"]
            engine.load_checkpoint(folder)
        train(engine, case, case.begin + inverted, case.begin + inverted + 1)
        momentum = windlass.zero.full_state(dict(engine.module.named_parameters())[MASKED], "exp_avg")
        assert momentum is not None
        found += [group["exp_avg_mask"].clone(), momentum.reshape(-1)]
        if not inverted:
            engine.save_checkpoint(folder)
        engine.destroy()
    return found


def test_a_load_keeps_the_mask_of_the_run(tmp_path: Path) -> None:
    case = replace(CASES["OneBitAdam"], masked=MASKED, begin=0, params=(("freeze_step", 1),), stage=1)
    saved, _, kept, momentum = run_ranks(resume_with, 2, case, str(tmp_path))[0]
    assert torch.equal(kept, 1 - saved) and not torch.equal(kept, saved)
    assert not momentum[kept == 0].any() and momentum[kept == 1].all()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_mask_that_does_not_fit_is_refused(stage: int) -> None:
    run_ranks(refuse, 1, stage)


def refuse(stage: int) -> None:
    case = replace(Case(), stage=stage)
    for name, mask in ((name, mask) for name in CASES for mask in (torch.ones(3), [1, 0])):
        model = oracle.build(specimen(case.model), 0)
        groups = [{"params": [p for p in model.parameters() if p.requires_grad], "exp_avg_mask": mask}]
        config = replace(case, optimizer=name, params=()).config()
        with pytest.raises(ConfigError, match="exp_avg_mask in the group of '.*' is .* a group of its own"):
            windlass.initialize(model=model, model_parameters=groups, config=config)


def test_a_mask_of_the_full_parameter_is_divided_as_the_parameter() -> None:
    class Unit:
        placements = (Placement((4, 3), (((0, 1), (2, 3)), ((0, 3),))),)
        names = ("w",)

        class layout:  # noqa: N801 - the name of the attribute
            numels = (6,)

    full = torch.arange(12.0).reshape(4, 3)
    for mask in (full, full.reshape(-1), full[[0, 2]], nn.Parameter(full)):
        values = torch.ones(4)
        apply_momentum_mask(values, {"exp_avg_mask": mask}, Unit, 0, 1)  # type: ignore[arg-type]
        assert values.tolist() == [1.0, 2.0, 6.0, 7.0]
