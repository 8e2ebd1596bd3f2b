"""Laws of a profile: ranges, waits by wire, kernels, memory, stragglers and the trace, from hand-made records."""

from __future__ import annotations

import gzip
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from windlass.base import trace_ranges
from windlass.base.collective_activity import WaitScope
from windlass.base.errors import ModelError
from windlass.base.trace_ranges import install_recorder, traced
from windlass.tracing.chrome_trace import chrome_trace, write_trace
from windlass.tracing.memory_timeline import ACTIVATIONS, UNSHARDED, HeldMemory, MemorySample, memory_timeline
from windlass.tracing.operator_events import OperatorEvents, covered, device_division, read_events
from windlass.tracing.profile_job import ProfileJob
from windlass.tracing.profile_rank import ProfileSession
from windlass.tracing.range_log import DISK, HOST_COPIES, RangeLog, wire_of
from windlass.tracing.rank_profile import NCCL, RankProfile, StepTimes, make_rank_profile
from windlass.tracing.run_profile import RunProfile, find_straggler


@pytest.fixture
def log() -> Any:
    made = RangeLog("gloo")
    before = install_recorder(made)
    yield made
    install_recorder(before)


def spin(seconds: float) -> None:
    """Use the processor for `seconds`."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_ranges_share_one_context_without_a_recorder() -> None:
    assert trace_ranges.recorder is None
    assert traced("forward") is traced("update", "x")  # the same object for all ranges
    scope = WaitScope("gather", ["w"])
    with scope:
        pass
    assert scope._token is None


def test_each_moment_belongs_to_the_innermost_wait(log: RangeLog) -> None:
    with traced("forward"):
        spin(0.01)
        with WaitScope("gather", ["w"]):
            time.sleep(0.02)
            with traced("disk", "parameters"):
                time.sleep(0.01)
    with traced("step"), traced("update"):
        time.sleep(0.01)  # idle time: neither computation nor a wait for a wire
    log.end_step()
    (step,) = log.steps
    assert step.start + step.compute + step.idle + sum(step.waits.values()) == step.end
    assert set(step.waits) == {"all-gather over gloo", DISK}
    assert step.waits["all-gather over gloo"] >= 20e6 and step.waits[DISK] >= 10e6
    assert step.compute >= 10e6 and step.idle >= 5e6
    assert set(step.phases) == {"forward", "step", "update"} and step.phases["forward"] >= 40e6
    names = [(one.kind, one.name, one.detail) for one in log.ranges]
    assert names[:3] == [("disk", "parameters", ""), ("wait", "gather", "w"), ("forward", "", "")]


def test_an_outer_end_closes_ranges_that_an_error_left_open_and_other_threads_do_not_count(log: RangeLog) -> None:
    outer = log.begin("forward", "")
    log.begin("block", "layers.0")
    log.end(outer)
    log.end(outer)  # ending a range twice has no effect
    thread = threading.Thread(target=lambda: log.end(log.begin("wait", "gather")))
    thread.start()
    thread.join()
    log.end_step()
    assert [one.kind for one in log.ranges] == ["block", "forward", "wait"]
    assert not log.steps[0].waits


@pytest.mark.parametrize(
    ("kind", "name", "wire"),
    [
        ("wait", "reduce", "reduction over gloo"),
        ("wait", "agreed order: the start of a forward", "agreement of the ranks"),
        ("wait", "agreement of the step", "agreement of the ranks"),
        ("wait", "a collective along tp", "collectives along tp"),
        ("wait", "a transfer along pp", "sends along pp"),
        ("wait", "something new", "something new"),
        ("fetch", "parameters", HOST_COPIES),
        ("forward", "", ""),
        ("send", "activations", ""),
    ],
)
def test_wires_by_range(kind: str, name: str, wire: str) -> None:
    assert wire_of(kind, name, "gloo") == wire


def test_kernels_decide_on_a_gpu() -> None:
    found = OperatorEvents(kernels=[(0, 4), (3, 6), (9, 20)], nccl=[(5, 8), (9, 10)])
    assert covered(found.kernels, 1, 12) == 5 + 3
    assert device_division(found, 0, 12) == (9, 2, 1)


def test_events_of_torch_are_put_on_the_monotonic_clock() -> None:
    events = [
        {"ph": "X", "cat": "user_annotation", "name": "windlass clock", "ts": 100.0, "dur": 1.0, "pid": 7, "tid": 7},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 110.0, "dur": 5.0, "pid": 7, "tid": 7},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 112.0, "dur": 4.0, "pid": 0, "tid": 3},
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel", "ts": 113.0, "dur": 1.0, "pid": 0, "tid": 4},
        {"ph": "X", "cat": "python_function", "name": "f", "ts": 1.0, "dur": 1.0},
        {"ph": "i", "name": "[memory]", "ts": 111.0, "args": {"Device Type": 0, "Bytes": 64}},
        {"ph": "i", "name": "[memory]", "ts": 112.0, "args": {"Device Type": 1, "Bytes": -8}},
    ]
    found = read_events(events, 1100.0, on_gpu=False)
    assert [(one["name"], one["ts"]) for one in found.events] == [
        ("aten::mm", 1110.0),
        ("gemm", 1112.0),
        ("ncclDevKernel", 1113.0),
    ]
    assert found.allocations == [(1111.0, 64)] and found.kernels == [(1112.0, 1116.0)]
    assert read_events(events, 1100.0, on_gpu=True).allocations == [(1112.0, -8)]


def test_activations_are_what_the_allocator_has_beyond_unsharded_parameters() -> None:
    held = HeldMemory({"parameters": 10}, {"parameters of a": 100}, frozenset({"parameters of a", "parameters of b"}))
    changes = [(1.0, "parameters of b", 50), (4.5, "parameters of a", 0), (5.0, "optimizer states of a", 9)]
    allocations = [(1.0, 50), (2.0, 30), (3.0, -10), (4.0, -100), (9.0, 7)]
    samples = memory_timeline(held, changes, allocations, 0.0, 8.0)
    by_time = {one.time: one.amounts for one in samples}
    assert by_time[0.0] == {"parameters": 10, UNSHARDED: 100, ACTIVATIONS: 0}
    assert by_time[2.0] == {"parameters": 10, UNSHARDED: 150, ACTIVATIONS: 30}
    assert by_time[4.5] == {"parameters": 10, UNSHARDED: 50, ACTIVATIONS: 20}
    assert max(one.total for one in samples) == 190 and 9.0 not in by_time
    unknown = memory_timeline(held, changes, None, 0.0, 8.0)
    assert all(ACTIVATIONS not in one.amounts for one in unknown)


def test_a_timeline_is_thinned_and_keeps_its_peak() -> None:
    allocations = [(float(time), size) for time in range(1, 9000, 2) for size in (3, -2)]
    samples = memory_timeline(HeldMemory({}, {}, frozenset()), [], allocations, 0.0, 9000.0)
    assert len(samples) <= 2001 and max(one.total for one in samples) == 4500 + 2


def times(own: float, wait: float = 0.0, **more: float) -> StepTimes:
    return StepTimes(own + wait, own, 0.0, {"reduction over gloo": wait, **more})


def test_the_rank_that_waits_least_straggles_and_the_cause_is_named() -> None:
    assert find_straggler({0: times(100)}) is None
    assert find_straggler({0: times(100, 5), 1: times(105)}) is None  # the difference is below a tenth
    slow = find_straggler({0: times(100, 40), 1: times(140), 2: times(101, 39)})
    assert slow is not None and (slow.rank, slow.cause) == (1, "compute")
    assert "rank 1 needs 140.0 ms" in str(slow) and "39.5 ms more" in str(slow)
    disk = StepTimes(140, 100, 0, {DISK: 40})
    slow = find_straggler({0: times(100, 40), 1: disk})
    assert slow is not None and (slow.rank, slow.cause) == (1, DISK)


def recorded(rank: int, log: RangeLog, operators: OperatorEvents | None = None, host: str = "a") -> RankProfile:
    held = HeldMemory({"parameters": 1 << 20}, {}, frozenset())
    made = make_rank_profile(log, operators, held, rank=rank, host=host, device="cpu", transport="gloo")
    return RankProfile.unpack(made.pack())


def test_one_file_has_all_ranks_on_one_clock(log: RangeLog, tmp_path: Path) -> None:
    log.begin_flight(("gather", 1), "gather", "w")
    with traced("forward"), WaitScope("gather", ["w"]):
        pass
    log.end_flight(("gather", 1))
    log.end_flight("unknown")
    log.end_step()
    first, second, other = recorded(0, log), recorded(1, log), recorded(2, log, host="b")
    other.clock = (first.clock[0] + 5e6, first.clock[1])  # a clock that is 5 s ahead
    other.bounds = [one + 5e6 for one in other.bounds]
    for event in other.events:
        event["ts"] += 5e6
    run = RunProfile([first, second, other])
    for name in ("trace.json", "trace.json.gz"):
        write_trace(run, tmp_path / name)
    text = (tmp_path / "trace.json").read_text()
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes())) == json.loads(text)
    events = chrome_trace(run)["traceEvents"]
    steps = {one["pid"]: one["ts"] for one in events if one["name"] == "step 1"}
    assert set(steps) == {0, 1, 2} and min(steps.values()) == 0 and max(steps.values()) < 2e6
    waits = [one for one in events if one["name"] == "wait: gather w"]
    assert [one["pid"] for one in waits] == [0, 1, 2] and all(one["ph"] == "X" and one["dur"] >= 0 for one in waits)
    flights = [one for one in events if one.get("cat") == "windlass,flight"]
    assert sorted(one["id"] for one in flights) == ["0.0", "0.0", "1.0", "1.0", "2.0", "2.0"]
    counters = [one for one in events if one["ph"] == "C"]
    assert counters and counters[0]["args"]["parameters"] == 1
    assert "no rank straggles" in run.summary() and "all-gather over gloo" in json.dumps(run.as_json())


def test_the_summary_takes_kernels_for_the_compute_of_a_gpu(log: RangeLog) -> None:
    log.end_step()
    start, end = log.steps[0].start / 1000, log.steps[0].end / 1000
    middle = (start + end) / 2
    profile = recorded(0, log, OperatorEvents(kernels=[(start, middle)], nccl=[(middle, end)]))
    (step,) = profile.steps
    assert step.compute == pytest.approx((middle - start) / 1000, abs=1e-6)
    assert step.waits == {NCCL: pytest.approx((end - middle) / 1000, abs=1e-6)}
    assert profile.memory[0] == MemorySample(start, {"parameters": 1 << 20, ACTIVATIONS: 0})


def test_a_script_that_destroys_its_process_group_is_told_how_many_steps_it_made() -> None:
    session = ProfileSession(ProfileJob("", steps=5, skip=1))
    recorded: Any = SimpleNamespace(recorded_steps=2, seen_steps=3)
    session.profiler = recorded
    with pytest.raises(ModelError, match=r"destroyed its process group, .* 2 of 5 recorded steps; pass --steps 2"):
        session.finish_early()
