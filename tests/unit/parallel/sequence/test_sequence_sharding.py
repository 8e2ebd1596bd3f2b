"""Tests of sequence sharding: every token has exactly one place, and ranks have equal amounts of work."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.base.errors import ModelError
from windlass.comm.mesh_axis import single_rank_axis
from windlass.parallel.sequence.batch_sharding import mark_sharded_batch
from windlass.parallel.sequence.sequence_sharding import (
    SequenceShardPattern,
    count_tokens,
    make_sharding_from_sizes,
    merge_ranges,
    select_range,
)


@st.composite
def patterns(draw: st.DrawFn) -> tuple[SequenceShardPattern, int]:
    ulysses, ring = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    ranks = ulysses * ring
    return SequenceShardPattern(ranks, ulysses, draw(st.booleans())), draw(st.integers(ranks, 5 * ranks + 7))


@given(patterns())
def test_every_token_is_on_one_rank_and_every_rank_has_tokens(case: tuple[SequenceShardPattern, int]) -> None:
    pattern, length = case
    cut = pattern.shard(length)
    tokens = [token for ranges in cut.ranges for start, stop in ranges for token in range(start, stop)]
    assert sorted(tokens) == list(range(length))
    assert cut.length == length and min(cut.sizes) >= 1
    assert max(cut.sizes) - min(cut.sizes) <= 2  # with zigzag, each of the two ranges of a rank may be one token longer


@given(patterns())
def test_shard_and_restore_round_trip(case: tuple[SequenceShardPattern, int]) -> None:
    pattern, length = case
    cut = pattern.shard(length)
    full = torch.arange(2 * length).view(2, length)
    parts = [cut.local_shard(full, rank) for rank in range(pattern.ranks)]
    assert [part.shape[1] for part in parts] == cut.sizes
    assert torch.equal(cut.restore_order(torch.cat(parts, dim=1)), full)


@given(patterns())
def test_group_has_the_tokens_of_its_ranks_in_order(case: tuple[SequenceShardPattern, int]) -> None:
    pattern, length = case
    cut = pattern.shard(length)
    for group in range(cut.num_ring_groups):
        held = [t for start, stop in cut.group_ranges(group) for t in range(start, stop)]
        of_ranks = [t for rank in cut.group_ranks(group) for a, b in cut.ranges[rank] for t in range(a, b)]
        assert held == of_ranks


def test_balanced_causal_ring_of_1024_ranks_has_equal_work() -> None:
    pattern = SequenceShardPattern(1024, 8, zigzag=True)
    cut = pattern.shard(2**20)
    pairs = [
        sum(stop * (stop + 1) // 2 - start * (start + 1) // 2 for start, stop in cut.group_ranges(g))
        for g in range(128)
    ]
    assert max(pairs) - min(pairs) < 2e-3 * max(pairs)
    even = SequenceShardPattern(1024, 8).shard(2**20)
    last, first = (even.group_ranges(g)[0] for g in (127, 0))
    assert last[1] ** 2 - last[0] ** 2 > 200 * first[1] ** 2  # unbalanced without zigzag


def test_parts_of_given_sizes_are_consecutive() -> None:
    cut = make_sharding_from_sizes([3, 1, 4], 1)
    assert cut.ranges == (((0, 3),), ((3, 4),), ((4, 8),))
    assert cut.is_contiguous and cut.sizes == [3, 1, 4]


@pytest.mark.parametrize(
    ("ranges", "part", "wanted"),
    [
        (((0, 3), (5, 9)), (2, 5), ((2, 3), (5, 7))),
        (((0, 3), (5, 9)), (0, 7), ((0, 3), (5, 9))),
        (((4, 6),), (1, 1), ((0, 0),)),
    ],
)
def test_intersection_of_ranges(ranges: tuple, part: tuple, wanted: tuple) -> None:
    assert select_range(ranges, part) == wanted


def test_adjacent_ranges_are_merged() -> None:
    assert merge_ranges([(0, 2), (2, 5), (7, 7), (7, 9)]) == ((0, 5), (7, 9))
    assert merge_ranges([]) == ((0, 0),) and count_tokens(merge_ranges([])) == 0


def test_local_batch_without_positions_is_refused() -> None:
    """Clients that do not shard batches, like the Trainer of transformers 4, must not train on whole sequences."""
    batch = {"input_ids": torch.zeros(2, 6, dtype=torch.long)}
    with pytest.raises(ModelError, match="no position_ids.*UlyssesSPDataLoaderAdapter .*Trainer does from version 5"):
        mark_sharded_batch(batch, single_rank_axis("sp"), 1)
