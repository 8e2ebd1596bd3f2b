"""Tests of the arithmetic of shards and heads: each element has one owner, except shared key heads."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as some

from windlass.base.errors import ModelError
from windlass.parallel.tensor.head_partition import partition_heads
from windlass.parallel.tensor.rank_ranges import (
    compute_shard_grain,
    count_rank_elements,
    join_sections,
    make_even_ranges,
    scale_ranges,
)


@given(some.integers(1, 1024), some.integers(1, 70_000))
def test_every_feature_has_one_owner(ranks: int, size: int) -> None:
    shares = make_even_ranges(size, ranks)
    ends = [0, *(end for ranges in shares for span in ranges for end in span), size]
    assert ends == sorted(ends) and ends[1::2] == ends[::2]  # each range begins where the one before ended
    assert sum(count_rank_elements(shares)) == size


@given(some.integers(1, 256), some.integers(1, 512))
def test_range_sizes_differ_by_at_most_one_grain(ranks: int, grains: int) -> None:
    """Sizes that are multiples of 128, as in models, are split nearly evenly."""
    size = 128 * grains
    each = count_rank_elements(make_even_ranges(size, ranks))
    assert max(each) - min(each) <= compute_shard_grain(size, ranks)
    if size >= 64 * ranks:
        assert max(each) <= 1.125 * size / ranks
        assert size % ranks == 0 or all(item % 8 == 0 for item in each)


def test_sections_are_sharded_separately() -> None:
    three = [
        (6, scale_ranges([(0, 1), (1, 3)], 2)),
        (3, scale_ranges([(0, 1), (1, 3)], 1)),
        (4, scale_ranges([(0, 1), (1, 2)], 2)),
    ]
    assert join_sections(three) == (((0, 2), (6, 7), (9, 11)), ((2, 6), (7, 9), (11, 13)))


@given(some.integers(1, 64), some.integers(1, 16), some.integers(1, 64))
def test_query_heads_have_their_key_heads(key: int, group: int, ranks: int) -> None:
    query = key * group
    assume(query >= ranks)
    heads = partition_heads("attention", query, key, ranks)
    assert [start for start, _ in heads.query_ranges] == [0, *(stop for _, stop in heads.query_ranges[:-1])]
    assert heads.query_ranges[-1][1] == query and all(start < stop for start, stop in heads.query_ranges)
    owners = [0] * key
    for rank, (start, stop) in enumerate(heads.query_ranges):
        first, last = heads.key_range(rank)
        seen_query, seen_key = heads.local_counts(rank)
        assert seen_query == stop - start and seen_query % seen_key == 0
        order = heads.repeated_keys(rank) or tuple(range(last - first))
        assert len(order) == seen_key
        for local in range(seen_query):  # each local query head has the key head of the full attention
            assert first + order[local // (seen_query // seen_key)] == (start + local) // group
        for item in range(first, last):
            owners[item] += 1
    assert min(owners) >= 1
    assert heads.has_shared_keys == (max(owners) > 1)
    if key % ranks == 0 or group == 1:
        assert not heads.has_shared_keys


def test_key_heads_are_sharded_if_the_largest_share_stays_small() -> None:
    assert partition_heads("a", 32, 8, 3).query_ranges == (
        (0, 12),
        (12, 24),
        (24, 32),
    )  # 12 instead of 11 query heads: whole groups of 4, no shared key head
    assert partition_heads("a", 12, 3, 2).query_ranges == ((0, 6), (6, 12))  # not 8 and 4: a key head is shared
    assert partition_heads("a", 12, 3, 2, keep_groups=True).query_ranges == ((0, 8), (8, 12))
    with pytest.raises(ModelError, match="2 key heads are too few for 4 ranks"):
        partition_heads("a", 8, 2, 4, keep_groups=True)
