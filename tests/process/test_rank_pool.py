"""Tests of the pool of ranks under the benchmarks: results by rank, failures with their cause, and no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from windlass.base.errors import ConfigError
from windlass.cli.benches import rank_pool
from windlass.cli.benches.rank_pool import RankPool, RankPoolError


class Echo:
    """Worker whose commands answer, fail or do not answer."""

    def __init__(self, word: str, rank: int, init_method: str) -> None:
        self.word, self.rank, self.init_method = word, rank, init_method

    def answer(self, times: int) -> tuple[str, int, str | None]:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "WINDLASS_ECHO")
        return self.word * times, os.getpid(), ",".join(os.environ.get(name, "") for name in names)

    def meet(self) -> str:
        return self.init_method

    def fail(self, rank: int, kind: str) -> None:
        if self.rank != rank:
            time.sleep(60)
        if kind == "exit":
            os._exit(7)
        raise ConfigError("a key is wrong") if kind == "expected" else KeyError("inner")


def test_commands_are_answered_by_each_rank_until_the_pool_is_closed() -> None:
    with RankPool(partial(Echo, "ab"), 2, label="echo", env={"WINDLASS_ECHO": "on"}) as pool:
        first, second = pool.ask("answer", times=2), pool.ask("answer", times=1)
        assert [(word, results) for word, _, results in first] == [("abab", "0,0,2,2,on"), ("abab", "1,1,2,2,on")]
        assert [pid for _, pid, _ in first] == [pid for _, pid, _ in second], "the processes stay"
        assert len(set(pool.ask("meet"))) == 1
    assert "WINDLASS_ECHO" not in os.environ
    for _, pid, _ in first:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("expected", "a key is wrong"), ("bug", "KeyError: 'inner'"), ("exit", "ended with exit code 7")],
)
def test_a_failure_of_one_rank_ends_the_wait_for_the_others(
    kind: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_pool, "_AFTER_FAILURE_S", 1.0)
    with RankPool(partial(Echo, ""), 2, label="echo") as pool:
        with pytest.raises(RankPoolError) as raised:
            pool.ask("fail", rank=1, kind=kind)
        assert str(raised.value) == f"echo: rank 1: {words}"


def test_a_command_without_an_answer_is_named() -> None:
    with RankPool(partial(Echo, ""), 1, label="echo", timeout_s=0.5) as pool:
        pool._timeout_s = None
        pool.ask("meet")  # an answer: the process has started
        pool._timeout_s = 0.5
        with pytest.raises(RankPoolError, match="rank 0: no answer to 'fail' in 0.5 s"):
            pool.ask("fail", rank=1, kind="")


_SLOW = """
import os, time
if "WINDLASS_ECHO" in os.environ:  # a rank of the pool
    print("importing", flush=True)
    time.sleep(30)
class Worker: ...
"""
_POOL = """
import sys
from slow_worker import Worker
from windlass.cli.benches.rank_pool import RankPool
if __name__ == "__main__":
    try:
        with RankPool(Worker, 2, label="slow", env={"WINDLASS_ECHO": "on"}) as pool:
            pool.ask("answer")
    except KeyboardInterrupt:
        sys.exit(130)
"""


def test_ctrl_c_while_ranks_import_their_worker_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "slow_worker.py").write_text(_SLOW)
    (tmp_path / "pool.py").write_text(_POOL)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "pool.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # the group that a terminal sends its Ctrl-C to
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["importing\n"] * 2
        os.killpg(process.pid, signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    assert (process.returncode, printed) == (130, "")
