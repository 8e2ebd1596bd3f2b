"""Tests of the loss scale against a plain model of its rules, over random histories."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.base.errors import LossError
from windlass.base.log import logger
from windlass.optim.loss_scale import DynamicLossScale, StaticLossScale, make_loss_scale

KNOBS = {
    "loss_scale": 0.0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1.0,
}


@pytest.fixture(autouse=True)
def quiet() -> object:
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def expected_scale(history: list[bool], start: float, window: int, hysteresis: int, consecutive: bool) -> float:
    """Return the scale after `history`, computed from the whole history at every step."""
    scale, forgiven = start, 0
    for now, overflow in enumerate(history):
        since = history[: now + 1]
        good = len(since) - (max((i for i, bad in enumerate(since) if bad), default=-1) + 1)
        if overflow and forgiven + 1 < hysteresis:
            forgiven += 1
        elif overflow:
            scale = scale / 2
        else:
            doubles = good % window == 0
            scale = scale * 2 if doubles else scale
            forgiven = 0 if doubles or consecutive else forgiven
    return scale


@given(
    history=st.lists(st.booleans(), max_size=40),
    window=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_the_scale_follows_its_rules(history: list[bool], window: int, hysteresis: int, consecutive: bool) -> None:
    scaler = DynamicLossScale(2.0**16, window, hysteresis, consecutive, min_scale=2.0**-60)
    for overflow in history:
        scaler.update(overflow)
    assert scaler.scale == expected_scale(history, 2.0**16, window, hysteresis, consecutive)


@given(before=st.lists(st.booleans(), max_size=20), after=st.lists(st.booleans(), max_size=20))
@settings(max_examples=50, deadline=None)
def test_saving_and_loading_changes_nothing(before: list[bool], after: list[bool]) -> None:
    def make() -> DynamicLossScale:
        return DynamicLossScale(2.0**16, window=3, hysteresis=2, min_scale=2.0**-60)

    straight, saved, loaded = make(), make(), make()
    for overflow in before:
        straight.update(overflow)
        saved.update(overflow)
    loaded.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    for overflow in after:
        straight.update(overflow)
        loaded.update(overflow)
    assert loaded.state_dict() == straight.state_dict()


def test_recorded_histories() -> None:
    scaler = make_loss_scale(SimpleNamespace(**KNOBS))
    assert scaler.dynamic and scaler.scale == 65536
    results = []
    for _ in range(3):
        scaler.update(True)
        results.append(scaler.scale)
    # Hysteresis tolerates the first overflow only: it is not restored when the scale is lowered.
    assert results == [65536, 32768, 16384]
    for _ in range(1000):
        scaler.update(False)
    assert scaler.scale == 32768
    scaler.update(True)
    assert scaler.scale == 32768


def test_overflow_at_the_minimum_scale_is_an_error() -> None:
    scaler = DynamicLossScale(scale=4.0, hysteresis=1, min_scale=3.0)
    scaler.update(True)
    assert scaler.scale == 3.0
    with pytest.raises(LossError) as caught:
        scaler.update(True, location="model.w of rank 1, micro-batch 2")
    for word in ("loss scale 3", "fp16.min_loss_scale 3", "model.w of rank 1, micro-batch 2", "bf16"):
        assert word in str(caught.value)


def test_overflow_at_the_minimum_scale_may_be_ignored() -> None:
    scaler = DynamicLossScale(scale=1.0, window=1, hysteresis=1, on_min_scale="continue")
    scaler.update(True)
    assert scaler.scale == 1.0
    scaler.update(False)
    assert scaler.scale == 2.0


def test_the_scale_never_becomes_infinite_and_never_starts_below_the_minimum() -> None:
    scaler = DynamicLossScale(scale=2.0**120, window=1)
    for _ in range(20):
        scaler.update(False)
    assert scaler.scale == 2.0**126
    assert DynamicLossScale(scale=1.0, min_scale=8.0).scale == 8.0


def test_fixed_scale_never_changes() -> None:
    scaler = make_loss_scale(SimpleNamespace(**{**KNOBS, "loss_scale": 128.0}))
    assert not scaler.dynamic
    for overflow in (True, False, True):
        scaler.update(overflow)
    assert scaler.scale == 128.0
    scaler.load_state_dict(StaticLossScale(5.0).state_dict())
    assert scaler.scale == 128.0


def test_change_from_fixed_to_dynamic_restarts_the_scale() -> None:
    scaler = DynamicLossScale(scale=256.0)
    scaler.load_state_dict(StaticLossScale(5.0).state_dict())
    assert scaler.state_dict() == DynamicLossScale(scale=256.0).state_dict()
