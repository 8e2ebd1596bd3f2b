"""Tests that peft adapters train as in one process on linear layers that are sharded over tp, or in pipeline stages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.dist.harness import run_ranks
from tests.dist.parallel_runs import STEPS, Case, check, hold, plain, train

if importlib.util.find_spec("peft") is None:  # an import takes seconds, also where no test of this file runs
    pytest.skip("peft is not installed", allow_module_level=True)

_CASES = [
    Case("llama-lora", (("tp", 2),), stage=0),
    Case("llama-lora", (("tp", 2),), stage=3, world=4, accumulation=2),
    Case("llama-lora", (("tp", 2),), stage=1, more=(("tp_sequence_norms", True),)),
    pytest.param(Case("llama-lora", (("tp", 4),), stage=2), marks=pytest.mark.slow),  # fewer key heads than ranks
    Case("gpt2-lora", (("tp", 2),), stage=1, tied=True, more=(("tp_overlap_chunks", 2),)),
    Case("uneven-lora", (("tp", 2),), stage=2),
    pytest.param(Case("llama-lora", (("pp", 2),), stage=1, accumulation=3), marks=pytest.mark.slow),
    Case("gpt2-lora", (("pp", 2),), stage=3, tied=True, accumulation=2, more=(("recompute", True),)),
]


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_adapters_of_sharded_layers_train_as_one_process(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_adapters_of_sharded_layers_are_saved_in_full(axis: str, tmp_path: Path) -> None:
    cut, dense = Case("llama-lora", ((axis, 2),), stage=2), Case("llama-lora", ((axis, 1),), stage=3)
    run_ranks(train, 2, cut, 2, str(tmp_path))
    expected = plain("llama-lora", False, 1, 1)
    hold(dense, run_ranks(train, 1, dense, STEPS - 2, None, str(tmp_path)), expected, first=2)
