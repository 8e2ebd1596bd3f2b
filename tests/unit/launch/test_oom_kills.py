"""Tests that a rank killed by the kernel's OOM killer is distinguished from one killed by a signal."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from windlass.launch.exit_status import RankFailure
from windlass.launch.oom_kills import OomKillCounter


def machine(root: Path, membership: str, counter: str, kills: int) -> None:
    """Write the /proc and cgroup files of a machine whose OOM-kill counter is `kills`."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(membership)
    path = root / counter
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"low 0\noom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")


@pytest.mark.parametrize(
    ("membership", "counter"),
    [
        ("0::/user/run\n", "sys/fs/cgroup/user/run/memory.events"),
        ("9:cpu:/\n4:memory:/run\n0::/\n", "sys/fs/cgroup/memory/run/memory.oom_control"),
        ("", "proc/vmstat"),
    ],
)
def test_increased_counter_is_detected(membership: str, counter: str, tmp_path: Path) -> None:
    machine(tmp_path, membership, counter, 2)
    kills = OomKillCounter(tmp_path)
    assert not kills.has_increased()
    machine(tmp_path, membership, counter, 3)
    assert kills.has_increased()


def test_missing_counter_reports_no_kill(tmp_path: Path) -> None:
    assert not OomKillCounter(tmp_path).has_increased()


def test_exit_message_names_the_rank_and_the_likely_cause() -> None:
    killed = RankFailure(3, -signal.SIGKILL, 0.0, out_of_memory=True)
    assert str(killed).startswith("rank 3 was ended by SIGKILL: the kernel killed a process for lack of memory")
    assert "the kernel for lack of memory: see `dmesg`" in str(RankFailure(3, -signal.SIGKILL, 0.0))
    assert str(RankFailure(3, -signal.SIGTERM, 0.0)) == "rank 3 was ended by SIGTERM"
