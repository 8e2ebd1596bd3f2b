"""Tests that the nccl transport makes the right calls. The collectives run over gloo, which supports them too."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.dist.equivalence_runs import RankTrace, Setting, complaints, expected, train_rank
from tests.dist.harness import run_ranks
from tests.oracle import Recipe


def through_nccl_calls(name: str, recipe: Recipe, setting: Setting) -> RankTrace:
    from windlass.comm import choose_transport
    from windlass.comm.wire_transport import NcclTransport

    with mock.patch.object(choose_transport, "GlooTransport", NcclTransport):
        return train_rank(name, recipe, setting)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nccl_collectives_train_as_one_process(precision: str, stage: int) -> None:
    recipe = Recipe(ranks=2, accumulation=2, precision=precision)
    actual = run_ranks(through_nccl_calls, 2, "tied", recipe, Setting(stage=stage), transport="gloo")
    assert not complaints(actual, expected("tied", recipe), recipe)
