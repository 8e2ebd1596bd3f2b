"""Tests of the pauses before a replica is started again."""

from __future__ import annotations

from windlass.serving.replicas.replica_supervisor import RestartPolicy


def test_a_replica_that_serves_each_time_is_always_started_again() -> None:
    policy = RestartPolicy()
    assert [policy.pause_after(5.0) for _ in range(9)] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert policy.pause_after(40.0) == 0.0, "a long service ends the row"
    assert policy.pause_after(5.0) == 1.0


def test_five_failed_starts_in_a_row_are_the_last() -> None:
    policy = RestartPolicy()
    assert policy.pause_after(100.0) == 0.0
    assert [policy.pause_after(None) for _ in range(5)][-1] is None
    policy = RestartPolicy()
    for _ in range(3):
        assert [policy.pause_after(None) for _ in range(4)].count(None) == 0
        assert policy.pause_after(40.0) is not None, "a start that serves ends the row"
