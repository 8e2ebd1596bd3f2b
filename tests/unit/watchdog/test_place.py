"""Where a thread is: which wait, which line; and what is no wait though it looks like one."""

from __future__ import annotations

import sys
from contextlib import suppress
from threading import Event, Thread
from types import FrameType
from weakref import ref

import pytest
import torch.distributed as dist

from windlass.base.activity import During, activity
from windlass.watchdog.place import Kind, Watcher, kind_of, place_of_error


def test_whose_code_a_file_is() -> None:
    import torch

    import windlass.comm.shm as shm
    import windlass.storage.tier as tier
    import windlass.zero.unit as unit

    assert kind_of(shm.__file__) is Kind.MEETING
    assert kind_of(tier.__file__) is Kind.DISK
    assert kind_of(unit.__file__) is Kind.OWN
    assert kind_of(torch.__file__) is Kind.TORCH
    assert kind_of(dist.__file__) is Kind.MEETING
    assert kind_of(dist.__file__.replace("__init__", "checkpoint/planner")) is Kind.TORCH
    assert kind_of(pytest.__file__) is Kind.USER
    assert kind_of(__file__) is Kind.USER
    assert kind_of("<frozen runpy>") is Kind.STANDARD


def test_a_wait_is_known_by_its_mark() -> None:
    from windlass.comm.ordered_sum import sum_of_squares

    with pytest.raises(AttributeError) as missing, During("gather", ["a.weight"]):
        sum_of_squares(object())  # type: ignore[arg-type]
    place, waiting = place_of_error(missing.value, missing.value.__traceback__)
    assert waiting and (place.operation, place.names) == ("gather", ("a.weight",))
    assert activity.now is None


def test_outside_there_is_no_wait() -> None:
    watcher = Watcher()
    place = watcher.look()
    assert watcher.waits is None and place.operation == ""
    assert place.line.startswith("tests/unit/watchdog/test_place.py:")
    assert place.line.endswith("in test_outside_there_is_no_wait: place = watcher.look()")


class Work:
    """A collective on a stream of its own."""

    done = False

    def is_completed(self) -> bool:
        return self.done


def test_what_runs_apart_from_the_host_is_waited_for_until_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher, work = Watcher(), Work()
    with During("gather", ["a.weight"]):
        activity.started(work)
    assert activity.under_way is None, "nobody would ever let go of it"
    monkeypatch.setattr(activity, "watched", True)
    with During("gather", ["a.weight"]):
        activity.started(work)
        activity.started(Work())  # the oldest counts
    for _ in range(2):
        place = watcher.look()
        assert watcher.waits is work and (place.operation, place.names) == ("gather", ("a.weight",))
    work.done = True
    assert watcher.look().operation == "" and watcher.waits is None and activity.under_way is None


def test_marks_nest_and_remember_what_broke() -> None:
    with During("step") as _:
        outer = activity.now
        with pytest.raises(ValueError), During("reduce", ["b"]):
            assert activity.now is not outer
            raise ValueError
        assert activity.now is outer
    assert activity.now is None
    assert activity.broken is not None and activity.broken[1].operation == "reduce"


def test_waits_of_threads_are_apart() -> None:
    """A save that does not block waits in a thread of its own, and may begin and end at any time."""
    begun, over = Event(), Event()

    def save() -> None:
        with During("a save"):
            begun.set()
            over.wait(10)

    thread = Thread(target=save)
    with During("gather"):
        thread.start()
        begun.wait(10)
        assert activity.now is not None and activity.now.operation == "gather"
        assert thread.ident is not None and (mark := activity.of(thread.ident)) is not None
        assert mark.operation == "a save"
    assert activity.now is None
    over.set()
    thread.join()
    assert activity.now is None and activity.of(thread.ident) is None


class Kept:
    """What a frame may hold: an activation, say."""


def test_an_error_that_was_caught_is_let_go() -> None:
    """With it goes what its frames hold, which whoever tries again with less may need."""
    gone: list[ref[Kept]] = []

    def run_out_of_memory() -> None:
        kept = Kept()
        gone.append(ref(kept))
        with During("gather"):
            raise MemoryError

    with suppress(MemoryError):
        run_out_of_memory()
    assert gone[0]() is None


def test_frames_without_a_line_are_no_obstacle() -> None:
    frame: FrameType | None = sys._getframe()
    assert frame is not None
    from windlass.watchdog import place

    assert place._line(frame.f_code, 0).endswith("in test_frames_without_a_line_are_no_obstacle")


def test_the_calls_that_it_knows_by_name_are_the_engines() -> None:
    from windlass.engine.train import Engine
    from windlass.watchdog.place import _CALLS

    for known in _CALLS:
        assert getattr(Engine, known.rpartition(".")[2]).__qualname__ == known
