"""What is proved ends a run, what is not is only told: the verdict on every picture that one may have of the ranks."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from windlass.watchdog.place import Place
from windlass.watchdog.record import End, Record
from windlass.watchdog.report import report
from windlass.watchdog.settings import Limits
from windlass.watchdog.sight import Lookout, Sight, State
from windlass.watchdog.verdict import Verdict, judge, spans

LIMITS = Limits()


def sight(
    rank: int,
    operation: str = "",
    waits_s: float = 0.0,
    *,
    names: tuple[str, ...] = (),
    state: State = State.ALIVE,
    end: End = End.NO,
) -> Sight:
    place = Place("step", operation, names, f"train.py:{rank} in main: go()")
    return Sight(rank, Record(rank, "host", 1, 1, place, waits_s, end=end), state)


def verdict(*sights: Sight) -> Verdict:
    found = judge(list(sights), LIMITS)
    assert found is not None
    return found


def test_ranks_that_work_are_left_alone() -> None:
    assert judge([sight(0), sight(1, "gather", 29.0)], LIMITS) is None


def test_a_straggler_is_named_and_not_ended() -> None:
    found = verdict(sight(0, "gather", 31), sight(1), sight(2, "gather", 31))
    assert not found.fatal
    assert found.headline.startswith("ranks 0, 2 wait for 31 s now, for rank 1, which is alive and elsewhere")


@pytest.mark.parametrize("state", [State.ALIVE, State.STOPPED, State.SILENT])
def test_a_rank_that_lives_is_waited_for_until_the_time_is_over(state: State) -> None:
    other = sight(1, state=state)
    assert not verdict(sight(0, "gather", 599), other).fatal
    assert verdict(sight(0, "gather", 600), other).fatal


def test_an_absent_rank_may_still_come() -> None:
    found = verdict(sight(0, "barrier", 40), Sight(1, None, State.ABSENT))
    assert not found.fatal and "rank 1, which is not there yet" in found.headline


def test_different_operations_are_a_proof_once_nobody_moves() -> None:
    one, other = sight(0, "gather", 15, names=("a.weight",)), sight(1, "agreement of the step", 15)
    assert verdict(one, other).fatal
    assert judge([one, sight(1, "agreement of the step", 14)], LIMITS) is None  # it may be about to move
    assert judge([one, other, sight(2)], LIMITS) is None  # whoever waits for nobody may meet either
    assert judge([one, other, sight(2, state=State.STOPPED)], LIMITS) is None
    assert verdict(one, sight(1, "gather", 15, names=("b.weight",))).fatal


def test_the_same_operation_everywhere_is_slow_at_worst() -> None:
    same = [sight(rank, "gather", 31, names=("a.weight",)) for rank in range(3)]
    assert not verdict(*same).fatal


def test_a_process_that_is_gone_is_a_proof_once_somebody_waits() -> None:
    dead = sight(1, state=State.DEAD)
    assert judge([sight(0), dead], LIMITS) is None
    assert judge([sight(0, "gather", 4), dead], LIMITS) is None
    found = verdict(sight(0, "gather", 5), dead, sight(2))
    assert found.fatal and "the process of rank 1 is gone" in found.headline
    assert verdict(sight(0, "gather", end=End.CUT_OFF), dead).fatal


def test_the_first_cause_is_named_before_what_follows() -> None:
    failed, cut_off = sight(1, end=End.FAILED), sight(0, "gather", end=End.CUT_OFF)
    assert "rank 1 ended with an exception, and rank 0 waits" in verdict(cut_off, failed).headline
    gone = replace(failed, state=State.DEAD)
    assert "rank 1 ended with an exception" in verdict(cut_off, gone, sight(2, state=State.DEAD)).headline


def test_a_rank_may_end_before_others_that_need_it_no_more() -> None:
    done = sight(1, end=End.DONE)
    assert judge([sight(0), done], LIMITS) is None
    assert judge([sight(0, "gather", 20), sight(2), done], LIMITS) is None
    assert "rank 1 ended early" in verdict(sight(0, "gather", 5), done).headline


def test_the_table_shows_equal_ranks_once() -> None:
    sights = [replace(sight(rank, "gather", 31, names=("l.0.w", "l.0.b"))) for rank in range(3)]
    place = Place("forward", "gather", ("l.0.w", "l.0.b"), "train.py:7 in main: x")
    sights = [replace(one, record=replace(one.record, place=place)) for one in sights if one.record is not None]
    failed = replace(sight(3, end=End.FAILED))
    assert failed.record is not None
    failed = replace(failed, record=replace(failed.record, error="Traceback\nValueError: no\n"))
    text = report(Verdict("why", True), [*sights, failed], 0)
    first, second, third, headline, _, row, other = text.splitlines()
    assert (first, second, third) == ("rank 3 failed first:", "Traceback", "ValueError: no")
    assert headline == "hang report: why"
    assert row.split("  ")[1:3] == ["0-2 ", "waits "] or "0-2" in row
    assert "31 s" in row and "gather (forward)" in row and "l.0.w and 1 more (l.0)" in row and row.endswith("main: x")
    assert " 3 " in other and "failed" in other


def test_numbers_are_told_as_spans() -> None:
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_a_lookout_tells_the_dead_from_the_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("windlass.watchdog.sight.time.monotonic", lambda: now[0])
    lookout = Lookout(4, "here", LIMITS)
    here = Record(0, "here", os.getpid(), 1, Place())
    gone = Record(1, "here", 2**22 + 1, 1, Place())  # above Linux's largest process id
    far = Record(2, "there", 1, 1, Place())
    lookout.update({0: here, 1: gone, 2: far})
    assert [one.state for one in lookout.sights()] == [State.ALIVE, State.DEAD, State.ALIVE, State.ABSENT]
    now[0] += 10
    lookout.update({0: replace(here, beat=2)})
    assert [one.state for one in lookout.sights()] == [State.ALIVE, State.DEAD, State.SILENT, State.ABSENT]
    now[0] += 20  # nothing from that host at all
    assert lookout.sights()[2].state is State.DEAD
    lookout.update({3: Record(3, "there", 5, 1, Place())})  # another of its ranks is there, and does not call it gone
    assert lookout.sights()[2].state is State.SILENT
    lookout.update({3: Record(3, "there", 5, 2, Place(), gone=(2,))})
    assert lookout.sights()[2].state is State.DEAD


def test_nobody_is_silent_while_the_lookout_itself_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("windlass.watchdog.sight.time.monotonic", lambda: now[0])
    lookout = Lookout(1, "here", LIMITS)
    lookout.update({0: Record(0, "there", 1, 1, Place())})
    now[0] += 3600
    lookout.skip(3599)
    assert lookout.sights()[0].state is State.ALIVE


def test_a_host_that_is_gone_ends_the_run_in_time() -> None:
    """A wait until the first look, silence from there, a tick to the verdict, its table, a tick for all to read it."""
    assert LIMITS.look_after + LIMITS.lost_after + (1 + 2.5 + 1) * LIMITS.tick <= 30


def test_a_container_is_a_host_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them may share a name and a kernel, and neither sees the processes of the other."""
    from windlass.watchdog import watch

    before = watch._host()
    assert before == watch._host()
    monkeypatch.setattr(watch.os, "readlink", lambda path: "pid:[1]")
    assert watch._host() != before


def test_a_record_comes_back_as_it_was() -> None:
    record = Record(3, "h", 7, 9, Place("step", "reduce", ("a",), "x.py:1 in f"), 1.5, 2.5, End.FAILED, "no", (1, 2))
    assert Record.from_text(record.to_text()) == record
