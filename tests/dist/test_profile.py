"""Tests of profiles: they change no bit of a run, contain all ranks, and end a script on all ranks."""

from __future__ import annotations

import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.dist.harness import run_ranks
from windlass.base import trace_ranges
from windlass.base.errors import ModelError
from windlass.config import load_config
from windlass.parallel.model_shape import ModelShape
from windlass.simulate.cluster_file import known_cluster
from windlass.simulate.predict_step import predict_step
from windlass.simulate.timeline import write_trace as write_predicted_trace

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import windlass
from torch import nn

net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
engine, *_ = windlass.initialize(model=net, config=config)
for step in range(int(sys.argv[1])):
    engine.backward(engine(torch.ones(2, 16)).square().mean())
    engine.step()
engine.destroy()
"""


def built() -> Any:
    import windlass

    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    return windlass.initialize(model=net, config=config)[0]


def train(engine: Any, steps: range, sleeps: float = 0.0) -> None:
    for step in steps:
        for micro in range(2):
            rows = torch.full((2, 16), 1.0 + step + micro + dist.get_rank())
            engine.backward(engine(rows).square().mean())
            engine.step()
        time.sleep(sleeps * dist.get_rank())


def is_recording() -> bool:
    return trace_ranges.recorder is not None


def train_twice(path: str) -> tuple[str, str, dict[str, Any] | None]:
    """Return the fingerprints of a run without and with a profile, and on rank 0 the profile's summary."""
    import windlass

    plain = built()
    train(plain, range(4))
    expected = plain.fingerprint()
    plain.destroy()
    engine = built()
    train(engine, range(2))
    with windlass.profile(engine, path) as found:
        assert is_recording()
        train(engine, range(2, 4), sleeps=0.05)
    assert not is_recording()
    fingerprint = engine.fingerprint()
    with pytest.raises(ModelError, match="no step ended in the profile"), windlass.profile(engine, path):
        pass
    engine.destroy()
    return expected, fingerprint, found.run.as_json() if found.run is not None else None


@pytest.mark.parametrize("transport", ["gloo", pytest.param("shm", marks=pytest.mark.slow)])
def test_a_profile_changes_nothing_and_has_all_ranks(transport: str, tmp_path: Path) -> None:
    results = run_ranks(train_twice, 2, str(tmp_path / "trace.json"), transport=transport)
    assert len({fingerprint for expected, fingerprint, _ in results} | {results[0][0]}) == 1
    summary = results[0][2]
    assert results[1][2] is None and summary is not None and summary["steps"] == 2
    for rank in summary["ranks"]:
        mean = rank["mean_ms"]
        assert mean["total"] == pytest.approx(mean["compute"] + mean["idle"] + sum(mean["waits"].values()))
        assert {"forward", "backward", "step", "update"} <= set(mean["phases"])
        assert {"parameters", "optimizer states", "activations and temporaries"} <= set(rank["peak_memory"])
        waits = " ".join(mean["waits"])
        assert "all-gather over" in waits and "reduction over" in waits and "agreement of the ranks" in waits
    assert summary["ranks"][1]["mean_ms"]["idle"] > 20  # rank 1 slept for 50 ms in each step
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["windlass"] == summary
    events = trace["traceEvents"]
    for rank in (0, 1):
        names = {one["name"] for one in events if one["pid"] == rank}
        assert {"step 1", "step 2", "forward", "backward", "step", "update", "memory, MiB", "aten::addmm"} <= names
        assert any(name.startswith("wait: gather ") for name in names)
        assert any(name.startswith("block ") for name in names)
        flights = [one["ph"] for one in events if one["pid"] == rank and one.get("cat") == "windlass,flight"]
        assert flights.count("b") == flights.count("e") > 0
    assert all(one["ts"] >= 0 for one in events if one["ph"] in "XC" and one["name"].startswith(("step ", "memory")))
    assert_format_of_a_predicted_step(trace, tmp_path / "predicted.json.gz")


def assert_format_of_a_predicted_step(real: dict[str, Any], path: Path) -> None:
    """Check that a profile's trace and a predicted one have the same fields, kinds of events and tracks."""
    shape, zero = ModelShape(32, 2, 4, 64), {"stage": 3, "stage3_param_persistence_threshold": 0}
    settings = load_config({"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero})
    place = known_cluster("cpu").with_devices(2)
    write_predicted_trace(predict_step(shape, settings, place, world_size=2, length=16, timeline=True), path)
    predicted = json.loads(gzip.decompress(path.read_bytes()))
    assert set(predicted) == set(real)
    found = []
    for trace in (real, predicted):
        own = [one for one in trace["traceEvents"] if one["ph"] == "X" and one["cat"].startswith("windlass,")]
        named = [one for one in trace["traceEvents"] if one["ph"] == "M"]
        steps = [one for one in own if one["cat"] == "windlass,steps"]
        tracks = {(one["pid"], one["tid"]): one["args"]["name"] for one in named if one["name"] == "thread_name"}
        assert steps and all(tracks[one["pid"], one["tid"]] == "steps" for one in steps)
        assert {(one["pid"], one["tid"]) for one in own} <= set(tracks)
        found.append((frozenset.intersection(*(frozenset(one) for one in own)), {one["name"] for one in named}))
        # Every event ends before the last step does, in microseconds; an operation may begin before the first step.
        last = max(one["ts"] + one["dur"] for one in steps)
        assert all(one["ts"] + one["dur"] <= 1.001 * last for one in own) and last > 10
    assert found[0] == found[1]


def profile_of_script(folder: str, steps: int, skip: int, made: int) -> str:
    """Profile a script that makes `made` steps. Return the text of the error, or an empty text."""
    from windlass.tracing.profile_job import ProfileJob
    from windlass.tracing.profile_rank import profile_script

    arguments, search = sys.argv, list(sys.path)
    try:
        script = [str(Path(folder, "train.py")), str(made)]
        profile_script(ProfileJob(folder, script, str(Path(folder, "trace.json")), steps, skip, None, False))
    except ModelError as error:
        return str(error)
    finally:
        sys.argv, sys.path[:] = arguments, search
    return ""


def test_a_script_is_ended_on_all_ranks_after_its_steps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    assert run_ranks(profile_of_script, 2, str(tmp_path), 2, 1, 1000) == ["", ""]
    result = json.loads((tmp_path / "summary.json").read_text())
    assert result["data"]["steps"] == 2 and "on 2 ranks" in result["text"]
    assert "activations are unknown, because operators were not recorded" in result["text"]
    (early,) = set(run_ranks(profile_of_script, 2, str(tmp_path), 2, 5, 3))
    assert "the script ended after 3 steps, and the profile begins after --skip 5" in early
