"""Tests that comms_logger counts calls by size, with bandwidths computed from their times."""

from __future__ import annotations

import contextlib
import io
import time
from typing import Any

import pytest
import torch

from tests.dist.harness import run_ranks
from windlass.comm.collective_bandwidth import calc_bw_log, convert_size, trimmed_mean

BYTES, MILLISECONDS = 1_000_000, 8.0  # one Gbit/s


@pytest.mark.parametrize(
    ("operation", "algorithmic", "bus"),
    [
        ("all_reduce", 2.0, 1.5),
        ("all_gather", 4.0, 3.0),
        ("reduce_scatter_tensor", 4.0, 3.0),
        ("all_to_all_single", 1.0, 0.75),
        ("broadcast", 1.0, 1.0),
        ("my_own", 1.0, 1.0),
    ],
)
def test_bandwidths_on_four_ranks(operation: str, algorithmic: float, bus: float) -> None:
    assert calc_bw_log(operation, BYTES, MILLISECONDS, 4) == pytest.approx((algorithmic, bus))
    assert calc_bw_log(operation, BYTES, 0.0, 4) == (0.0, 0.0)


def test_sizes_and_means() -> None:
    assert [convert_size(size) for size in (0, 100, 1536, 5 << 20)] == ["0B", "100.0 B", "1.5 KB", "5.0 MB"]
    assert trimmed_mean([100.0, *[2.0] * 8, 0.0]) == 2.0 and trimmed_mean([]) == 0.0


def count_calls() -> dict[str, Any]:
    from windlass.compat import collectives as comm

    rank, size = comm.get_rank(), comm.get_world_size()
    log = comm.comms_logger
    log.reset_data()
    try:
        comm.all_reduce(torch.ones(4))
        assert not comm.has_comm_data()  # the logger is off by default
        comm.configure({"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["gradients"]}})
        comm.all_reduce(torch.ones(4))  # not counted: no name of prof_ops, no prof=True
        comm.all_reduce(torch.ones(4), log_name="gradients")
        comm.broadcast(torch.ones(2), 0, prof=True)
        assert comm.get_logged_comm_ops() == ["gradients", "broadcast"]
        comm.configure(prof_all=True)
        for _ in range(3):
            comm.all_reduce(torch.ones(256))
        comm.all_reduce(torch.ones(2, 4), async_op=True).wait()
        work = comm.all_reduce(torch.ones(5), async_op=True)
        assert work.get_future().wait()[0].tolist() == [size] * 5
        work.wait()  # a second wait is not counted again
        comm.all_gather([torch.zeros(8) for _ in range(size)], torch.zeros(8))
        for work in comm.batch_isend_irecv(
            [comm.P2POp(comm.isend, torch.ones(3), (rank + 1) % size), comm.P2POp(comm.irecv, torch.ones(3), rank - 1)]
            if rank
            else [comm.P2POp(comm.irecv, torch.ones(3), size - 1), comm.P2POp(comm.isend, torch.ones(3), 1)]
        ):
            work.wait()
        comm.barrier()
        comm.configure(debug=True)
        comm.barrier()
        comm.configure(debug=False)
        if rank == size - 1:
            time.sleep(0.3)
        comm.all_reduce(torch.ones(1000), log_name="late")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            result = comm.log_summary(show_straggler=True, return_dict=True)
        total = comm.get_comm_operation_count()
        comm.reset_log()
        assert result is not None and not comm.has_comm_data()
        return {**result, "printed": printed.getvalue(), "total": total}
    finally:
        comm.configure(enabled=False)
        log.prof_all, log.prof_ops = True, []
        log.reset_data()


def test_calls_are_counted_by_name_and_size() -> None:
    ranks = run_ranks(count_calls, 3)
    for rank, result in enumerate(ranks):
        summary = result["summary"]
        counts = {name: {size: row["count"] for size, row in sizes.items()} for name, sizes in summary.items()}
        assert counts == {
            "gradients": {16: 1},
            "broadcast": {8: 1},
            "all_reduce": {20: 1, 32: 1, 1024: 3},
            "all_gather": {32: 1},
            "batch_isend_irecv": {24: 1},
            "barrier": {0: 1},
            "barrier | [Caller Func: count_calls]": {0: 1},
            "late": {4000: 1},
        }
        assert result["total"] == 12 and result["metadata"]["rank"] == rank and result["metadata"]["world_size"] == 3
        row = summary["all_reduce"][1024]
        assert row["msg_size_str"] == "1.0 KB" and 0 < row["avg_latency_ms"] <= row["total_latency_ms"]
        late = result["straggler_analysis"]["late"][4000]
        assert (late["total_straggler_ms"] > late["total_comm_lat_ms"]) == (rank < 2)  # the last rank came late
        assert summary["late"][4000]["busbw_avg_gbps"] == pytest.approx(
            calc_bw_log("all_reduce", 4000, summary["late"][4000]["total_latency_ms"], 3)[1]
        )
        assert ("straggler effect" in result["printed"] and "1.0 KB" in result["printed"]) == (rank == 0)


def train_logged(transport: str) -> dict[str, Any]:
    import windlass
    from windlass.compat import collectives as comm

    comm.comms_logger.reset_data()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
        "comms_logger": {"enabled": True},
    }
    engine, *_ = windlass.initialize(model=model, config=config)
    try:
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 8)).sum())
            engine.step()
        result = comm.log_summary(return_dict=True)
        assert result is not None
        return dict(result["engine"])
    finally:
        comm.configure(enabled=False)
        comm.reset_log()
        engine.destroy()


def test_engine_traffic_is_counted(transport: str) -> None:
    for engine in run_ranks(train_logged, 2, transport, transport=transport):
        assert sum(engine["reduce"].values()) >= 3 and sum(engine["gather"].values()) >= 3
        assert sum(moved * count for moved, count in engine["reduce"].items()) >= 3 * 144 * 4 // 2
