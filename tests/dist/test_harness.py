"""Tests of the harness: worlds, environment, failures, hangs."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist import harness
from tests.dist.harness import Pool, RankError, RankTimeout, run_ranks


def summed(value: float) -> dict[str, Any]:
    total = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    return {
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "sum": total,
        "env": {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "WINDLASS_TRANSPORT", "EXTRA")},
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
    }


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_world_size_runs_on_the_warm_pool(world: int) -> None:
    results = run_ranks(summed, world, 2.0, env={"EXTRA": "x"}, transport="gloo")
    assert [r["rank"] for r in results] == list(range(world))
    for rank, result in enumerate(results):
        assert result["world"] == world
        assert result["sum"].item() == 2.0 * world * (world + 1) / 2
        assert result["threads"] == 1
        assert result["env"] == {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "WINDLASS_TRANSPORT": "gloo",
            "EXTRA": "x",
        }


def test_processes_are_reused_and_the_environment_is_restored() -> None:
    first = run_ranks(summed, 2, 1.0, env={"EXTRA": "x"})
    second = run_ranks(summed, 2, 1.0)
    assert [r["pid"] for r in first] == [r["pid"] for r in second]
    assert second[0]["env"]["EXTRA"] is None


def fails_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("the broken part")
    dist.all_reduce(torch.zeros(1))


def test_failure_has_rank_and_traceback_and_the_pool_survives() -> None:
    with pytest.raises(RankError, match=r"rank 1 raised(.|\n)*fails_on(.|\n)*the broken part") as caught:
        run_ranks(fails_on, 3, 1)
    assert caught.value.rank == 1
    assert "KeyError" in caught.value.kinds and "LookupError" in caught.value.kinds
    assert len(run_ranks(summed, 3, 1.0)) == 3


def hangs_on(rank: int) -> None:
    if dist.get_rank() == rank:
        sleeping_here()


def sleeping_here() -> None:
    time.sleep(600)


def dies() -> None:
    os._exit(7)


def test_hang_shows_stacks_death_shows_exit_code_and_the_pool_restarts() -> None:
    pool = Pool(size=1)
    try:
        pool.run(summed, 1, 1.0)  # imports this module, outside the short timeout below
        with pytest.raises(RankTimeout, match=r"rank 0 \(still running\)(.|\n)*sleeping_here"):
            pool.run(hangs_on, 1, 0, timeout=3.0)
        with pytest.raises(RankError, match="exit code 7"):
            pool.run(dies, 1)
        assert pool.run(summed, 1, 1.0)[0]["world"] == 1
    finally:
        pool.end()


def test_slow_start_leaves_no_late_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(size=1)
    try:
        with monkeypatch.context() as hasty, pytest.raises(RankTimeout, match="did not import torch"):
            hasty.setattr(harness, "START_SECONDS", 0.0)
            pool.run(summed, 1, 1.0)
        assert pool.run(summed, 1, 1.0)[0]["world"] == 1
    finally:
        pool.end()


def returns_a_lambda() -> Any:
    return lambda: None


def test_unpicklable_result_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(returns_a_lambda, 1)
    assert caught.value.kinds == ("PicklingError",)
