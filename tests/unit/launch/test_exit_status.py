"""Laws of combining the exit codes of many ranks into one."""

from __future__ import annotations

import signal

from hypothesis import given
from hypothesis import strategies as st

from windlass.base.processes import WATCHDOG_EXIT_CODE
from windlass.launch.exit_status import RankFailure, combine_failures

NOW = 1_700_000_000
OWN = st.integers(1, 127).filter(lambda code: code != WATCHDOG_EXIT_CODE)
TOLD_TO_STOP = st.sampled_from([-signal.SIGTERM, -signal.SIGINT, 130, 143])


def failures(*codes: int, at: int = NOW) -> list[RankFailure]:
    return [RankFailure(rank, code, at) for rank, code in enumerate(codes)]


def test_exit_code_without_failures_is_zero() -> None:
    assert combine_failures([]).exit_code == 0


@given(st.lists(OWN, min_size=1))
def test_worst_exit_code_is_returned(codes: list[int]) -> None:
    assert combine_failures(failures(*codes)).exit_code == max(codes)


@given(st.sampled_from([signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT, signal.SIGTERM, signal.SIGINT]))
def test_signal_exit_code_is_128_plus_its_number(number: signal.Signals) -> None:
    assert combine_failures(failures(-number)).exit_code == 128 + number


@given(OWN, st.lists(TOLD_TO_STOP))
def test_ranks_stopped_by_the_launcher_do_not_hide_the_cause(code: int, others: list[int]) -> None:
    assert combine_failures(failures(*others, code)).exit_code == code


@given(OWN, st.integers(1, 255) | st.just(-signal.SIGKILL), st.integers(2, 60))
def test_later_failures_do_not_hide_the_cause(code: int, later: int, seconds: int) -> None:
    outcome = combine_failures([*failures(later, at=NOW + seconds), RankFailure(1, code, NOW)])
    assert outcome.exit_code == code
    assert [failure.rank for failure in outcome.failures] == [1]


@given(TOLD_TO_STOP, st.floats(0.25, 60))
def test_rank_stopped_after_another_is_not_the_cause(code: int, seconds: float) -> None:
    outcome = combine_failures([RankFailure(0, -signal.SIGTERM, NOW + seconds), RankFailure(1, code, NOW)])
    assert (outcome.exit_code, len(outcome.failures)) == (RankFailure(1, code, NOW).exit_code, 1)


def test_messages_name_the_rank_and_its_exit() -> None:
    assert str(RankFailure(3, 7, NOW)) == "rank 3 ended with exit code 7"
    assert str(RankFailure(0, -signal.SIGSEGV, NOW)) == "rank 0 was ended by SIGSEGV"


@given(OWN)
def test_ranks_ended_by_the_watchdog_do_not_hide_the_cause(code: int) -> None:
    assert combine_failures(failures(WATCHDOG_EXIT_CODE, code)).exit_code == code
    assert combine_failures(failures(WATCHDOG_EXIT_CODE, -9)).exit_code == 137
    both = combine_failures(failures(WATCHDOG_EXIT_CODE, WATCHDOG_EXIT_CODE))
    assert both.exit_code == WATCHDOG_EXIT_CODE
    assert str(both.failures[0]) == "rank 0 was ended by its watchdog, whose report gives the reason"
