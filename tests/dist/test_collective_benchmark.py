"""Tests that collectives are measured on all ranks, with sizes and bandwidths that fit their times."""

from __future__ import annotations

import contextlib
import io
import itertools
from types import SimpleNamespace

import pytest
import torch

from tests.dist.harness import run_ranks
from windlass.base.errors import CommunicationError


def measure() -> str:
    from windlass.compat import collectives
    from windlass.compat.collective_benchmark import OPERATIONS, CollectiveSettings, measure_collectives
    from windlass.compat.ds_bench import ds_bench

    sizes = (5, 4096)
    for async_op in (False, True):
        settings = CollectiveSettings(
            sizes=sizes, dtypes=(torch.float32, torch.bfloat16), warmups=1, trials=2, async_op=async_op
        )
        rows = list(measure_collectives(settings))
        assert [(row.operation, row.dtype, row.nbytes) for row in rows] == [
            (operation, dtype, size)
            for operation in OPERATIONS
            for dtype, least in (("float32", 8), ("bfloat16", 8))
            for size in (least, 4096)
        ]
        assert all(row.seconds > 0 for row in rows)
    # 5, 6 and 8 bytes are the same message: a repeated row could not be drawn
    again = CollectiveSettings(["broadcast"] * 2, (5, 6, 8, 8), (torch.float32,) * 2, warmups=0, trials=1)
    assert [row.nbytes for row in measure_collectives(again)] == [8]
    with pytest.MonkeyPatch.context() as patch:
        ticks = itertools.count()  # each call of an operation takes a millisecond
        clock = SimpleNamespace(perf_counter=lambda: next(ticks) * 1e-3)
        patch.setattr("windlass.compat.collective_benchmark.time", clock)
        rows = list(measure_collectives(CollectiveSettings(sizes=(4096,), warmups=1, trials=3)))
    gbps = 4096 * 8 / 1e-3 / 1e9  # rate of one message
    expected = {  # algorithm and bus bandwidth of two ranks
        "all_reduce": (2 * gbps, gbps),
        "all_gather": (2 * gbps, gbps),
        "reduce_scatter": (2 * gbps, gbps),
        "all_to_all": (gbps, gbps / 2),
        "broadcast": (gbps, gbps),
        "pt2pt": (2 * gbps, 2 * gbps),  # there and back in a millisecond
    }
    for row in rows:
        assert row.seconds == pytest.approx(5e-4 if row.operation == "pt2pt" else 1e-3)
        assert (row.algorithm_gbps, row.bus_gbps) == pytest.approx(expected.pop(row.operation)), row.operation
    assert not expected
    with pytest.raises(CommunicationError, match="'gossip' is not an operation"):
        list(measure_collectives(CollectiveSettings(["gossip"])))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "destroy_process_group", lambda: None)  # the worker pool keeps its group
        words = ["--scan", "--maxsize", "3", "--trials", "1", "--warmups", "0", "--all-reduce", "--pt2pt", "--raw"]
        assert ds_bench([*words, "--bw-unit", "GBps", "--dtype", "bfloat16"]) == 0
        assert ds_bench(["--dtype", "complex"]) == 1
    return printed.getvalue()


def test_collectives_and_ds_bench() -> None:
    first, second = run_ranks(measure, 2, transport="gloo")
    assert second == ""
    lines = first.splitlines()
    assert len(lines) == 2 * (2 + 3) and "all_reduce (bfloat16), 2 ranks" in lines[0] and "GBps" in lines[1]
    assert [line.split()[0] for line in lines[2:5]] == ["4", "8", "16"]
    assert "pt2pt (bfloat16)" in lines[5]
