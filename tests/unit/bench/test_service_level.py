"""Tests of FastGen's service levels."""

from __future__ import annotations

import math
import random

from windlass.cli.benches.service_level import Level, RequestTimes, draw_requests, percentile, weighted_means


def test_weighted_means_are_those_of_the_definition() -> None:
    r = random.Random(0)
    values = [r.random() for _ in range(50)]
    decay = 1 - 2 / 17
    for number, mean in enumerate(weighted_means(values), 1):
        weights = [decay ** (number - 1 - place) for place in range(number)]
        expected = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert math.isclose(mean, expected, rel_tol=1e-12)
    assert weighted_means([]) == [] and weighted_means([3.0]) == [3.0]


def test_a_level_needs_the_first_token_and_every_mean() -> None:
    level = Level(token_seconds=0.01, gap_seconds=0.2)
    steady = [1.0 + 0.1 * place for place in range(40)]
    assert level.is_met_by(RequestTimes(100, 0.0, steady))
    assert not level.is_met_by(RequestTimes(99, 0.0, steady))  # the first token came after 1 s
    late = [*steady[:20], *(time + 0.7 for time in steady[20:])]
    assert level.is_met_by(RequestTimes(100, 0.0, late))  # one gap of 0.8 s among short ones
    early = [steady[0], *(time + 0.15 for time in steady[1:])]
    assert not level.is_met_by(RequestTimes(100, 0.0, early))  # the first mean is the first gap, 0.25 s
    assert level.is_met_by(RequestTimes(100, 0.0, [0.5]))


def test_lengths_are_drawn_around_their_means() -> None:
    found = draw_requests(2000, 260, 60, 1000, 1)
    lengths, answers = [len(one.prompt) for one in found], [one.answer for one in found]
    assert abs(sum(lengths) / 2000 - 260) < 6 and abs(sum(answers) / 2000 - 60) < 2
    assert max(lengths) <= 858 and min(answers) >= 1
    assert {token for one in found for token in one.prompt} == set(range(3, 1000))
    assert found == draw_requests(2000, 260, 60, 1000, 1) != draw_requests(2000, 260, 60, 1000, 2)


def test_percentiles_are_values_of_the_list() -> None:
    assert percentile(range(1, 101), 0.99) == 99 and percentile([5.0], 0.5) == 5.0
    assert percentile([1.0, 2.0], 0.5) == 1.0 and percentile([1.0, 2.0], 0.51) == 2.0 and percentile([], 0.5) == 0.0
