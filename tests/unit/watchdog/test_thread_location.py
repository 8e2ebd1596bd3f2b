"""Tests of locating a thread: the wait and the source line of a running or failed thread."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread, get_ident
from types import FrameType, SimpleNamespace
from weakref import ref

import pytest
import torch.distributed as dist

from windlass.base.collective_activity import WaitScope, activity
from windlass.watchdog.thread_location import CodeOrigin, ThreadObserver, code_origin, location_of_error


def test_code_origin_of_files() -> None:
    import torch

    import windlass.comm.shm_transport as shm
    import windlass.storage.disk_tier as tier
    import windlass.zero.core.unit as unit

    assert code_origin(shm.__file__) is CodeOrigin.COLLECTIVE_WAIT
    assert code_origin(tier.__file__) is CodeOrigin.DISK_WAIT
    assert code_origin(unit.__file__) is CodeOrigin.WINDLASS
    assert code_origin(torch.__file__) is CodeOrigin.TORCH
    assert code_origin(dist.__file__) is CodeOrigin.COLLECTIVE_WAIT
    assert code_origin(dist.__file__.replace("__init__", "checkpoint/planner")) is CodeOrigin.TORCH
    assert code_origin(pytest.__file__) is CodeOrigin.USER
    assert code_origin(__file__) is CodeOrigin.USER
    assert code_origin("<frozen runpy>") is CodeOrigin.STDLIB


def test_wait_is_recognized_by_its_scope() -> None:
    from windlass.comm.ordered_sum import sum_of_squares

    with pytest.raises(AttributeError) as missing, WaitScope("gather", ["a.weight"]):
        sum_of_squares(object())  # type: ignore[arg-type]
    thread_location, waiting = location_of_error(missing.value, missing.value.__traceback__)
    assert waiting and (thread_location.operation, thread_location.parameter_names) == ("gather", ("a.weight",))
    assert activity.current_wait is None


def test_no_wait_outside_a_wait_scope() -> None:
    watcher = ThreadObserver()
    thread_location = watcher.observe()
    assert watcher.current_wait is None and thread_location.operation == ""
    assert thread_location.source_line.startswith("tests/unit/watchdog/test_thread_location.py:")
    assert thread_location.source_line.endswith(
        "in test_no_wait_outside_a_wait_scope: thread_location = watcher.observe()"
    )


@pytest.mark.parametrize("depth", [200, 800])
def test_no_collection_starts_while_frames_are_read(depth: int) -> None:
    """Record where collections start: one in the walk would let the observed thread run, and so end the frames."""
    watcher, running = ThreadObserver(), list[str]()

    def record(phase: str, details: object) -> None:
        running.append(sys._getframe(1).f_code.co_name)

    def observe_at_depth(depth: int) -> None:
        if depth:
            return observe_at_depth(depth - 1)
        kept = [[] for _ in range(gc.get_threshold()[0] - gc.get_count()[0] - 20)]  # type: ignore[var-annotated]
        gc.callbacks.append(record)
        try:
            watcher.observe()
        finally:
            gc.callbacks.remove(record)
            del kept

    observe_at_depth(depth)
    assert "observe" in running and "_walk_outwards" not in running


def test_an_object_that_is_no_frame_ends_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = ThreadObserver()
    monkeypatch.setattr(sys, "_current_frames", lambda: dict.fromkeys([get_ident()], ("not", "a frame")))
    assert watcher.observe().source_line == "" and watcher.current_wait is None


def test_a_thread_is_located_after_its_working_directory_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert ThreadObserver().observe().source_line.startswith(f"{__file__}:")


class Work:
    """Fake of a collective that runs on a stream of its own."""

    done = False

    def is_completed(self) -> bool:
        return self.done


def test_asynchronous_work_is_a_wait_until_it_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher, work = ThreadObserver(), Work()
    with WaitScope("gather", ["a.weight"]):
        activity.collective_started(work)
    assert activity.pending_collective is None, "nobody would ever let go of it"
    monkeypatch.setattr(activity, "is_watched", True)
    with WaitScope("gather", ["a.weight"]):
        activity.collective_started(work)
        activity.collective_started(Work())  # the oldest collective is reported
    for _ in range(2):
        thread_location = watcher.observe()
        assert watcher.current_wait is work and (thread_location.operation, thread_location.parameter_names) == (
            "gather",
            ("a.weight",),
        )
    work.done = True
    assert watcher.observe().operation == "" and watcher.current_wait is None and activity.pending_collective is None


def test_wait_scopes_nest_and_record_the_failed_operation() -> None:
    with WaitScope("step") as _:
        outer = activity.current_wait
        with pytest.raises(ValueError), WaitScope("reduce", ["b"]):
            assert activity.current_wait is not outer
            raise ValueError
        assert activity.current_wait is outer
    assert activity.current_wait is None
    assert activity.failed_wait is not None and activity.failed_wait[1].operation == "reduce"


def test_waits_are_thread_local() -> None:
    """Waits of several threads are separate: an asynchronous save may wait while training waits for a gather."""
    begun, over = Event(), Event()

    def save() -> None:
        with WaitScope("a save"):
            begun.set()
            over.wait(60)

    thread = Thread(target=save)
    with WaitScope("gather"):
        thread.start()
        begun.wait(60)
        assert activity.current_wait is not None and activity.current_wait.operation == "gather"
        assert thread.ident is not None and (mark := activity.wait_of(thread.ident)) is not None
        assert mark.operation == "a save"
    assert activity.current_wait is None
    over.set()
    thread.join()
    assert activity.current_wait is None and activity.wait_of(thread.ident) is None


class Kept:
    """Object that a frame may hold, e.g. an activation."""


def test_caught_error_frees_its_frames() -> None:
    """A caught error frees the objects of its frames, so that a retry with less memory can succeed."""
    gone: list[ref[Kept]] = []

    def run_out_of_memory() -> None:
        kept = Kept()
        gone.append(ref(kept))
        with WaitScope("gather"):
            raise MemoryError

    with suppress(MemoryError):
        run_out_of_memory()
    assert gone[0]() is None


def test_frames_without_a_line_are_skipped() -> None:
    frame: FrameType | None = sys._getframe()
    assert frame is not None
    from windlass.watchdog import thread_location

    assert thread_location._source_line(frame.f_code, 0).endswith("in test_frames_without_a_line_are_skipped")


def test_calls_known_by_name_are_engine_methods() -> None:
    from windlass.engine.training_engine import Engine
    from windlass.watchdog.thread_location import _ENGINE_CALLS

    for known in _ENGINE_CALLS:
        assert getattr(Engine, known.rpartition(".")[2]).__qualname__ == known


def test_pipeline_and_ring_transfers_are_waits() -> None:
    from windlass.comm.mesh_axis import single_rank_axis
    from windlass.parallel.pipeline.stage_transfers import _InFlightTransfer
    from windlass.parallel.sequence.ring_attention import RingTransfer

    failing = SimpleNamespace(wait=partial(int, "a lost peer"))  # like torch's, its `wait` has no Python frame
    ring = RingTransfer(single_rank_axis("sp"), [], 0)
    ring._works = [failing]
    for wait, operation in (
        (_InFlightTransfer([], [failing]).wait, "wait_for_transfers"),
        (ring.wait, "a pass along sp"),
    ):
        with pytest.raises(ValueError) as lost:
            wait()
        thread_location, waiting = location_of_error(lost.value, lost.value.__traceback__)
        assert waiting and thread_location.operation == operation
