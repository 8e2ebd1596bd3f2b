"""Tests of the hang diagnosis: a proven deadlock ends the run, a suspected one is only reported."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from windlass.watchdog.hang_diagnosis import HangDiagnosis, diagnose, format_rank_ranges
from windlass.watchdog.hang_report import format_hang_report
from windlass.watchdog.heartbeat import Heartbeat, ProgramEnd
from windlass.watchdog.peer_status import PeerMonitor, PeerState, PeerStatus
from windlass.watchdog.thread_location import ThreadLocation
from windlass.watchdog.watchdog_limits import WatchdogLimits

LIMITS = WatchdogLimits()


def sight(
    rank: int,
    operation: str = "",
    waits_s: float = 0.0,
    *,
    names: tuple[str, ...] = (),
    state: PeerState = PeerState.ALIVE,
    end: ProgramEnd = ProgramEnd.RUNNING,
) -> PeerStatus:
    place = ThreadLocation("step", operation, names, f"train.py:{rank} in main: go()")
    return PeerStatus(rank, Heartbeat(rank, "host", 1, 1, place, waits_s, program_end=end), state)


def verdict(*sights: PeerStatus) -> HangDiagnosis:
    result = diagnose(list(sights), LIMITS)
    assert result is not None
    return result


def test_working_ranks_are_not_reported() -> None:
    assert diagnose([sight(0), sight(1, "gather", 29.0)], LIMITS) is None


def test_straggler_is_named_and_not_killed() -> None:
    result = verdict(sight(0, "gather", 31), sight(1), sight(2, "gather", 31))
    assert not result.fatal
    assert result.headline.startswith(
        "ranks 0, 2 wait for 31 s now, for rank 1, which is alive and not in the collective"
    )


@pytest.mark.parametrize("state", [PeerState.ALIVE, PeerState.STOPPED, PeerState.SILENT])
def test_live_rank_is_awaited_until_the_timeout(state: PeerState) -> None:
    other = sight(1, state=state)
    assert not verdict(sight(0, "gather", 599), other).fatal
    assert verdict(sight(0, "gather", 600), other).fatal


def test_unstarted_rank_is_not_fatal() -> None:
    result = verdict(sight(0, "barrier", 40), PeerStatus(1, None, PeerState.NOT_STARTED))
    assert not result.fatal and "rank 1, which is not started yet" in result.headline


def test_different_operations_are_fatal_once_no_rank_advances() -> None:
    item, other = sight(0, "gather", 15, names=("a.weight",)), sight(1, "agreement of the step", 15)
    assert verdict(item, other).fatal
    assert diagnose([item, sight(1, "agreement of the step", 14)], LIMITS) is None  # rank 1 has waited too briefly
    assert (
        diagnose([item, other, sight(2)], LIMITS) is None
    )  # rank 2 is not waiting and may still join either operation
    assert diagnose([item, other, sight(2, state=PeerState.STOPPED)], LIMITS) is None
    assert verdict(item, sight(1, "gather", 15, names=("b.weight",))).fatal


def test_equal_operations_on_all_ranks_are_never_fatal() -> None:
    same = [sight(rank, "gather", 31, names=("a.weight",)) for rank in range(3)]
    assert not verdict(*same).fatal


def test_dead_process_is_fatal_once_a_rank_waits() -> None:
    dead = sight(1, state=PeerState.DEAD)
    assert diagnose([sight(0), dead], LIMITS) is None
    assert diagnose([sight(0, "gather", 4), dead], LIMITS) is None
    result = verdict(sight(0, "gather", 5), dead, sight(2))
    assert result.fatal and "the process of rank 1 is gone" in result.headline
    assert verdict(sight(0, "gather", end=ProgramEnd.FAILED_IN_WAIT), dead).fatal


def test_first_cause_is_named_before_its_effects() -> None:
    failed, cut_off = sight(1, end=ProgramEnd.FAILED), sight(0, "gather", end=ProgramEnd.FAILED_IN_WAIT)
    assert "rank 1 ended with an exception, and rank 0 waits" in verdict(cut_off, failed).headline
    gone = replace(failed, state=PeerState.DEAD)
    assert "rank 1 ended with an exception" in verdict(cut_off, gone, sight(2, state=PeerState.DEAD)).headline


def test_finished_rank_is_no_failure() -> None:
    done = sight(1, end=ProgramEnd.DONE)
    assert diagnose([sight(0), done], LIMITS) is None
    assert diagnose([sight(0, "gather", 20), sight(2), done], LIMITS) is None
    assert "rank 1 ended early" in verdict(sight(0, "gather", 5), done).headline


def test_table_merges_equal_ranks() -> None:
    sights = [replace(sight(rank, "gather", 31, names=("l.0.w", "l.0.b"))) for rank in range(3)]
    place = ThreadLocation("forward", "gather", ("l.0.w", "l.0.b"), "train.py:7 in main: x")
    sights = [
        replace(item, heartbeat=replace(item.heartbeat, location=place))
        for item in sights
        if item.heartbeat is not None
    ]
    failed = replace(sight(3, end=ProgramEnd.FAILED))
    assert failed.heartbeat is not None
    failed = replace(failed, heartbeat=replace(failed.heartbeat, error="Traceback\nValueError: no\n"))
    text = format_hang_report(HangDiagnosis("why", True), [*sights, failed], 0)
    first, second, third, headline, _, row, other = text.splitlines()
    assert (first, second, third) == ("rank 3 failed first:", "Traceback", "ValueError: no")
    assert headline == "hang report: why"
    assert row.split("  ")[1:3] == ["0-2 ", "waits "] or "0-2" in row
    assert "31 s" in row and "gather (forward)" in row and "l.0.w and 1 more (l.0)" in row and row.endswith("main: x")
    assert " 3 " in other and "failed" in other


def test_rank_numbers_are_printed_as_ranges() -> None:
    assert format_rank_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_peer_monitor_distinguishes_dead_and_silent_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("windlass.watchdog.peer_status.time.monotonic", lambda: now[0])
    lookout = PeerMonitor(4, "here", LIMITS)
    here = Heartbeat(0, "here", os.getpid(), 1, ThreadLocation())
    gone = Heartbeat(1, "here", 2**22 + 1, 1, ThreadLocation())  # above Linux's largest process id
    far = Heartbeat(2, "there", 1, 1, ThreadLocation())
    lookout.update({0: here, 1: gone, 2: far})
    assert [item.state for item in lookout.peer_statuses()] == [
        PeerState.ALIVE,
        PeerState.DEAD,
        PeerState.ALIVE,
        PeerState.NOT_STARTED,
    ]
    now[0] += 10
    lookout.update({0: replace(here, beat=2)})
    assert [item.state for item in lookout.peer_statuses()] == [
        PeerState.ALIVE,
        PeerState.DEAD,
        PeerState.SILENT,
        PeerState.NOT_STARTED,
    ]
    now[0] += 20  # 30 s without a heartbeat from the host `there`
    assert lookout.peer_statuses()[2].state is PeerState.DEAD
    lookout.update(
        {3: Heartbeat(3, "there", 5, 1, ThreadLocation())}
    )  # another rank of the host `there` is alive and does not report rank 2 dead
    assert lookout.peer_statuses()[2].state is PeerState.SILENT
    lookout.update({3: Heartbeat(3, "there", 5, 2, ThreadLocation(), dead_local_ranks=(2,))})
    assert lookout.peer_statuses()[2].state is PeerState.DEAD


def test_suspended_peer_monitor_reports_no_rank_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("windlass.watchdog.peer_status.time.monotonic", lambda: now[0])
    lookout = PeerMonitor(1, "here", LIMITS)
    lookout.update({0: Heartbeat(0, "there", 1, 1, ThreadLocation())})
    now[0] += 3600
    lookout.ignore_pause(3599)
    assert lookout.peer_statuses()[0].state is PeerState.ALIVE


def test_lost_host_ends_the_run_in_time() -> None:
    """A lost host ends the run within 30 s.

    The time is the sum of: the wait until the first check, the time until a silent host counts as lost, one heartbeat
    interval until the diagnosis, 2.5 for printing the report, and one until all ranks have read the decision.
    """
    assert LIMITS.check_peers_after + LIMITS.host_lost_after + (1 + 2.5 + 1) * LIMITS.beat_interval <= 30


def test_container_counts_as_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container is a host of its own.

    Two containers may share a host name and a kernel, but neither sees the processes of the other.
    """
    from windlass.watchdog import watchdog_thread

    before = watchdog_thread._host_identity()
    assert before == watchdog_thread._host_identity()
    monkeypatch.setattr(watchdog_thread.os, "readlink", lambda path: "pid:[1]")
    assert watchdog_thread._host_identity() != before


def test_heartbeat_round_trips() -> None:
    record = Heartbeat(
        3, "h", 7, 9, ThreadLocation("step", "reduce", ("a",), "x.py:1 in f"), 1.5, 2.5, ProgramEnd.FAILED, "no", (1, 2)
    )
    assert Heartbeat.from_json(record.to_json()) == record
