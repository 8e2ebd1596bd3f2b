"""Tests of per-rank states loaded on another number of ranks: their mean or sum is kept, or all become zero."""

from __future__ import annotations

import pytest
import torch

from windlass.zero.update.rank_state import mean_of_ranks, share_of_sum, zeros_on_ranks

ROWS = torch.tensor([[1.0, -2.0, 4.0], [3.0, 6.0, -8.0]])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rank_state_rules_keep_mean_sum_or_nothing(ranks: int) -> None:
    mean, share, zeros = (rule(ROWS, ranks) for rule in (mean_of_ranks, share_of_sum, zeros_on_ranks))
    assert mean.shape == share.shape == zeros.shape == (ranks, 3)
    torch.testing.assert_close(mean.mean(0), ROWS.mean(0))
    torch.testing.assert_close(share.sum(0), ROWS.sum(0))
    assert torch.equal(zeros, torch.zeros(ranks, 3))
    assert (mean == mean[0]).all() and (share == share[0]).all()
