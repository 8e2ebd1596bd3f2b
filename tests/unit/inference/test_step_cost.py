"""Properties of the predicted time of a step."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.inference.step_cost import StepCost


@st.composite
def costs(draw: st.DrawFn) -> StepCost:
    """Draw costs with or without measured points."""
    steps = draw(st.lists(st.tuples(st.integers(1, 200), st.floats(1e-4, 0.1)), max_size=5))
    points, tokens, seconds = [], 0, draw(st.floats(1e-4, 0.1))
    for more, longer in steps:
        tokens = tokens + more if points else 1
        seconds += longer
        points.append((tokens, seconds))
    return StepCost(
        draw(st.floats(0, 0.01)),
        draw(st.floats(1e-4, 0.1)),
        draw(st.floats(1e-5, 0.01)),
        draw(st.floats(0, 1e-5)),
        draw(st.floats(0, 1e-6)),
        tuple(points),
        draw(st.floats(0.5, 4)),
    )


@settings(max_examples=300, deadline=None)
@given(costs(), st.integers(0, 5000), st.integers(0, 10_000))
def test_a_step_of_more_tokens_takes_no_less_time(cost: StepCost, cached: int, pairs: int) -> None:
    times = [cost.step_seconds(tokens, cached, pairs) for tokens in range(1, 400, 7)]
    assert all(before <= after + 1e-12 for before, after in pairwise(times))
    assert cost.step_seconds(5, cached + 1, pairs + 1) >= cost.step_seconds(5, cached, pairs)


@settings(max_examples=300, deadline=None)
@given(costs(), st.floats(1e-4, 2), st.integers(0, 5000))
def test_tokens_within_a_time_are_the_most_that_fit(cost: StepCost, seconds: float, cached: int) -> None:
    tokens = cost.tokens_within(seconds, cached)
    if tokens:
        assert cost.step_seconds(tokens, cached) <= seconds * (1 + 1e-9)
    if tokens < 10**8:
        assert cost.step_seconds(tokens + 2, cached) >= seconds * (1 - 1e-9)


def test_measured_points_are_returned_exactly_and_extended() -> None:
    cost = StepCost(token_seconds=0.002, points=((1, 0.010), (8, 0.012), (64, 0.100)))
    assert [cost.step_seconds(tokens, 0) for tokens in (1, 8, 64)] == [0.010, 0.012, 0.100]
    assert abs(cost.step_seconds(36, 0) - 0.056) < 1e-12
    assert abs(cost.step_seconds(100, 0) - 0.172) < 1e-12
