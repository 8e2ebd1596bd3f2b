"""Tests of the batch size of an elastic run, in which the number of ranks may change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.base.errors import ConfigError
from windlass.config import load_config
from windlass.config.elastic_batch import find_elastic_batch, solve_elastic_batch
from windlass.config.elasticity_section import Elasticity


def section(**values: object) -> Elasticity:
    return Elasticity.model_validate({"enabled": True, **values})


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(12, 3000), st.integers(1, 8), st.booleans())
def test_valid_world_sizes_divide_the_batch(sizes: list[int], bound: int, least: int, larger: bool) -> None:
    requested = section(micro_batch_sizes=sizes, max_train_batch_size=bound, min_gpus=least, prefer_larger_batch=larger)
    try:
        result = find_elastic_batch(requested)
    except ConfigError as error:  # only if no batch exists: the smallest micro-batch allows the most ranks
        assert "no batch up to" in str(error) and bound // min(sizes) < 2 * least
        return
    assert result.train <= bound
    for ranks in range(1, min(result.train, 200) + 1):
        fits = ranks >= least and any(result.train % (size * ranks) == 0 for size in sizes)
        assert (ranks in result.rank_counts) == fits
        if fits:
            batch = solve_elastic_batch(requested, ranks)
            assert batch.train == result.train == batch.micro * batch.accumulation * ranks
            assert batch.micro == max(size for size in sizes if result.train % (size * ranks) == 0)
        else:
            with pytest.raises(ConfigError, match=f"{ranks} ranks"):
                solve_elastic_batch(requested, ranks)


def many_divisors(bound: int) -> list[int]:
    """Return the numbers up to `bound` that have more divisors than any smaller number, by counting divisors."""
    result, most = [], 0
    for number in range(1, bound + 1):
        divisors = sum(number % n == 0 for n in range(1, number + 1))
        if divisors > most:
            result, most = [*result, number], divisors
    return result


MANY_DIVISORS = many_divisors(720)


def by_the_rule(sizes: list[int], bound: int, least: int, most: int, larger: bool) -> tuple[int, list[int]]:
    """Compute the documented rule by exhaustive search.

    For each micro-batch size and for their least common multiple, take the largest multiple up to `bound` whose factor
    is in `MANY_DIVISORS`. Of these batches, choose the one with the most valid numbers of ranks. `larger` decides ties.
    """
    common = next(n for n in range(1, bound + 2) if n > bound or all(n % size == 0 for size in sizes))
    batches = [base * max(n for n in MANY_DIVISORS if base * n <= bound) for base in (*sizes, common) if base <= bound]
    best: tuple[int, list[int]] = (0, [])
    for batch in sorted(set(batches), reverse=not larger):
        ranks = [n for n in range(least, min(most, batch) + 1) if any(batch % (size * n) == 0 for size in sizes)]
        if len(ranks) >= len(best[1]):
            best = batch, ranks
    return best


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(12, 800),
    st.integers(1, 4),
    st.integers(4, 64),
    st.booleans(),
)
def test_elastic_batch_follows_the_rule(sizes: list[int], bound: int, least: int, most: int, larger: bool) -> None:
    requested = section(
        micro_batch_sizes=sizes, max_train_batch_size=bound, min_gpus=least, max_gpus=most, prefer_larger_batch=larger
    )
    train, ranks = by_the_rule(sizes, bound, least, most, larger)
    if not ranks:
        with pytest.raises(ConfigError, match="fits any number of"):
            find_elastic_batch(requested)
        return
    result = find_elastic_batch(requested)
    assert (result.train, list(result.rank_counts)) == (train, ranks)


def test_highly_composite_numbers_are_complete() -> None:
    from windlass.config.elastic_batch import _MANY_DIVISORS

    assert [n for n in _MANY_DIVISORS if n <= 720] == MANY_DIVISORS


def test_elastic_batch_equals_deepspeed() -> None:
    """The result equals DeepSpeed's: 10 000 samples, micro-batches of 8, 12, 16 or 17, 32 to 1500 GPUs.

    DeepSpeed chooses a batch of 9792, which 23 numbers of GPUs can share.
    """
    requested = section(max_train_batch_size=10000, micro_batch_sizes=[8, 12, 16, 17], min_gpus=32, max_gpus=1500)
    result = find_elastic_batch(requested)
    assert result.train == 9792
    assert len(result.rank_counts) == 23
    assert solve_elastic_batch(requested, 64).micro == 17


def test_ties_prefer_the_larger_or_smaller_batch() -> None:
    values = {"max_train_batch_size": 7, "micro_batch_sizes": [5, 7]}
    assert find_elastic_batch(section(**values)).train == 7
    assert find_elastic_batch(section(**values, prefer_larger_batch=False)).train == 5


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 9, which is more than elasticity.max_train_batch_size 8"):
        find_elastic_batch(section(max_train_batch_size=8, micro_batch_sizes=[2, 9]))
    with pytest.raises(ConfigError, match="no batch up to max_train_batch_size 8"):
        find_elastic_batch(section(max_train_batch_size=8, micro_batch_sizes=[2], min_gpus=50))
    with pytest.raises(ConfigError, match="start 4 or 6 ranks"):
        solve_elastic_batch(section(max_train_batch_size=24, micro_batch_sizes=[2]), 5)


def test_elastic_batch_beside_other_batch_sizes_is_refused_unless_ignored() -> None:
    elastic = {"enabled": True, "max_train_batch_size": 24, "micro_batch_sizes": [2]}
    with pytest.raises(ConfigError, match="train_batch_size: 8, but elasticity.enabled computes the batch"):
        load_config({"train_batch_size": 8, "elasticity": elastic})
    config = load_config({"train_batch_size": 8, "elasticity": {**elastic, "ignore_non_elastic_batch_info": True}})
    assert config.resolve_batch(3).train == 24
    assert config.resolve_batch(3).accumulation == 4
    assert not config.refusals()
    assert load_config({"train_batch_size": 8, "elasticity": {"enabled": False}}).resolve_batch(2).train == 8


def test_elastic_batch_is_divided_by_data_loading_ranks() -> None:
    section = {"enabled": True, "max_train_batch_size": 24, "micro_batch_sizes": [2, 3]}
    plain = load_config({"elasticity": section}).resolve_batch(4)
    cut = load_config({"elasticity": section, "parallel": {"pp": 2, "tp": 2}}).resolve_batch(16)
    assert cut == plain
