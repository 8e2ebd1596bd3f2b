"""Tests that a transformers model trains as in one process over any mesh axes, at any stage, from any tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.parallel_runs import Case, check

_CASES = [
    pytest.param(Case("llama", (("tp", 2),), stage=1), marks=pytest.mark.slow),
    Case("gpt2", (("tp", 2),), stage=3, tied=True, under_init=True),
    pytest.param(Case("uneven", (("tp", 2),), stage=2, zero=(("unit_merge_threshold", 3000),)), marks=pytest.mark.slow),
    Case(
        "uneven", (("tp", 2),), stage=3, world=4, zero=(("stage3_param_persistence_threshold", 900),), under_init=True
    ),
    pytest.param(Case("mixtral", (("ep", 2),), stage=2), marks=pytest.mark.slow),
    pytest.param(Case("llama", (("sp", 2),), stage=2), marks=pytest.mark.slow),
    Case("llama", (("sp", 2),), stage=3, sequence="ring"),
    pytest.param(Case("llama", (("pp", 2),), stage=2, accumulation=3), marks=pytest.mark.slow),
    Case("gpt2", (("pp", 2),), stage=3, tied=True, accumulation=2),
    Case("mixtral", (("ep", 2), ("tp", 2)), stage=3, host=True, under_init=True),
    pytest.param(Case("llama", (("tp", 2),), stage=3, world=4, accumulation=2), marks=pytest.mark.slow),
    # slow: test_sequence_and_tensor_parallel also tests these axes
    pytest.param(Case("llama", (("sp", 2), ("tp", 2)), stage=1, tied=True), marks=pytest.mark.slow),
    pytest.param(Case("gpt2", (("sp", 2), ("tp", 2)), stage=3, sequence="ring", tied=True), marks=pytest.mark.slow),
    pytest.param(Case("mixtral", (("ep", 2), ("sp", 2)), stage=2), marks=pytest.mark.slow),
    Case("mixtral", (("ep", 2), ("sp", 2)), stage=3, sequence="ring", host=True),
    Case("llama", (("pp", 2), ("tp", 2)), stage=3, tied=True, accumulation=2, under_init=True),
    pytest.param(Case("gpt2", (("pp", 2), ("tp", 2)), stage=1, accumulation=3), marks=pytest.mark.slow),
    # slow: test_pipeline_engine also tests these axes
    pytest.param(Case("llama", (("pp", 2), ("sp", 2)), stage=2, accumulation=2), marks=pytest.mark.slow),
    pytest.param(
        Case("mixtral", (("pp", 2), ("ep", 2)), stage=3, accumulation=2, under_init=True), marks=pytest.mark.slow
    ),
    Case("llama", (("pp", 2),), stage=3, host=True, world=4, accumulation=4),
    Case("llama", (("sp", 2),), stage=3, more=(("tiled_mlp", 3), ("tiled_loss", 4), ("recompute", True))),
    Case("gpt2", (("tp", 2),), stage=2, tied=True, more=(("recompute", True), ("activation_tier", "cpu"))),
]


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_layout_trains_as_one_process(case: Case) -> None:
    check(case)


def test_stages_with_different_numbers_of_parameters_read_them_from_disk(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    check(Case("llama", (("pp", 2),), stage=1, accumulation=2, zero=(("offload_optimizer", disk),)))
