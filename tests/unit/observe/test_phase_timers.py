"""Tests that timers sum their intervals, and do nothing when disabled."""

from __future__ import annotations

import pytest

from windlass.base.errors import WindlassError
from windlass.observe import phase_timers as module
from windlass.observe.phase_timers import Timers


class Clock:
    """Clock that the test advances."""

    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "synchronized_time", lambda device: clock.now)
    return clock


def test_laps_add_up_and_timers_nest(clock: Clock) -> None:
    timers = Timers()
    with timers("step"):
        clock.now += 1
        for _ in range(2):
            with timers("forward"):
                clock.now += 2
    laps = timers.take_totals()
    assert {name: (lap.count, lap.seconds) for name, lap in laps.items()} == {"forward": (2, 4.0), "step": (1, 5.0)}
    assert timers.take_totals() == {}


def test_the_summary_is_in_milliseconds_a_step(clock: Clock) -> None:
    timers = Timers()
    for _ in range(4):
        with timers("forward"):
            clock.now += 0.010
        with timers("backward"):
            clock.now += 0.0205
    assert timers.summary(steps=2) == "forward 20.0 ms | backward 41.0 ms"
    assert timers.summary() == ""


def test_a_timer_that_is_running_outlives_take(clock: Clock) -> None:
    timers = Timers()
    timers.start("epoch")
    clock.now += 3
    assert timers.take_totals() == {}
    timers.stop("epoch")
    assert timers.take_totals()["epoch"].seconds == 3


def test_a_block_that_raises_is_counted(clock: Clock) -> None:
    timers = Timers()
    with pytest.raises(KeyError), timers("forward"):
        clock.now += 1
        raise KeyError
    with timers("forward"):
        clock.now += 1
    assert timers.take_totals()["forward"].count == 2


def test_device_is_synchronized_only_when_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr("windlass.base.compute_device.synchronize", lambda device: waited.append(device.type))
    for enabled in (False, True):
        timers = Timers("cuda", enabled=enabled)
        with timers("forward"):
            pass
        assert waited == (["cuda", "cuda"] if enabled else [])
        assert set(timers.take_totals()) == ({"forward"} if enabled else set())


def test_misuse_is_refused() -> None:
    timers = Timers()
    timers.start("a")
    with pytest.raises(WindlassError, match="'a' is started twice"):
        timers.start("a")
    with pytest.raises(WindlassError, match="'b'.*running: \\['a'\\]"):
        timers.stop("b")
