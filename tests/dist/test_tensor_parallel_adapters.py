"""Tests that peft adapters beside linear layers sharded over tp train as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.harness import run_ranks
from tests.dist.parallel_runs import STEPS, Case, check, hold, plain, train

pytest.importorskip("peft")

_CASES = [
    Case("llama-lora", (("tp", 2),), stage=0),
    Case("llama-lora", (("tp", 2),), stage=3, world=4, accumulation=2),
    Case("llama-lora", (("tp", 2),), stage=1, more=(("tp_sequence_norms", True),)),
    Case("llama-lora", (("tp", 4),), stage=2),  # fewer key heads than ranks
    Case("gpt2-lora", (("tp", 2),), stage=1, tied=True, more=(("tp_overlap_chunks", 2),)),
    Case("uneven-lora", (("tp", 2),), stage=2),
]


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_adapters_of_sharded_layers_train_as_one_process(case: Case) -> None:
    check(case)


def test_adapters_of_sharded_layers_are_saved_in_full(tmp_path: Path) -> None:
    cut, dense = Case("llama-lora", (("tp", 2),), stage=2), Case("llama-lora", (("tp", 1),), stage=3)
    run_ranks(train, 2, cut, 2, str(tmp_path))
    expected = plain("llama-lora", False, 1, 1)
    hold(dense, run_ranks(train, 1, dense, STEPS - 2, None, str(tmp_path)), expected, first=2)
