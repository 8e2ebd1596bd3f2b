"""Tests that a long run leaks nothing: memory, files, threads, shared memory and Python objects."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import windlass
from tests.dist import parallel_runs, pipeline_engine_runs
from tests.dist.equivalence_runs import ADAMW, Setting, ds_config, specimen, start
from tests.dist.harness import run_ranks
from tests.dist.test_offload import offload_to
from tests.models import Place
from tests.oracle import Recipe

# stage, tier of states, tier of parameters, more keys of the optimizer's section
CASES = [
    (0, "none", "none", {}),
    (1, "cpu", "none", {}),
    (2, "nvme", "none", {}),
    (3, "nvme", "nvme", {}),
    (3, "cpu", "cpu", {}),
    (2, "cpu", "none", {"delayed_update": True}),
]

OFFLOADED_ACTIVATIONS = {"activation_checkpointing": {"cpu_checkpointing": True}}
AXES = {
    "tp": parallel_runs.Case("llama", (("tp", 2),), stage=1),
    "sp": parallel_runs.Case("llama", (("sp", 2),), stage=3),
    "ring": parallel_runs.Case("llama", (("sp", 2),), stage=2, sequence="ring"),
    "ep": parallel_runs.Case("mixtral", (("ep", 2),), stage=3),
    "offloaded activations": parallel_runs.Case("llama", (("tp", 1),), 3, world=2, more=(("recompute", True),)),
    "adapters over a pipeline": parallel_runs.Case("llama-lora", (("pp", 2),), stage=3, more=(("recompute", True),)),
    "whole rule": parallel_runs.Case("llama", (("tp", 2),), stage=1, optimizer="Lamb", params=(("lr", 1e-3),)),
}

LASTING = ("files", "threads", "python threads", "shared memory")


def resources() -> dict[str, int]:
    """Return the resources of this process."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    shared = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line}
    objects = gc.get_objects()
    return {
        "objects": len(objects),
        "graphs": sum(type(one) in (torch.Tensor, nn.Parameter) and one.grad_fn is not None for one in objects),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "python threads": threading.active_count(),
        "shared memory": len(shared),
        "memory": int(status["VmRSS"].split()[0]) * 1024,
    }


def after_all(first: dict[str, int]) -> dict[str, int]:
    """Return the resources once they are no more than `first`, or after 30 s.

    Threads of closed groups end with a delay.
    """
    for _ in range(60):
        now = resources()
        if all(now[name] <= first[name] for name in LASTING):
            break
        time.sleep(0.5)
    return now


def zero_steps(case: tuple[int, str, str, dict[str, Any]], folder: str) -> tuple[Any, Callable[[int], None]]:
    stage, state, param, more = case
    subject = specimen("tied")
    recipe = Recipe(accumulation=2, optimizer="AdamW", optimizer_params=ADAMW)
    engine = start(subject, ds_config(recipe, Setting(stage=stage, zero=offload_to(state, param, folder, **more))))

    def step(number: int) -> None:
        for micro in range(2):
            subject.train(engine, subject.batch(Place(number % 7, micro, dist.get_rank())), engine.backward)
            engine.step()

    return engine, step


def pipeline_steps() -> tuple[Any, Callable[[int], None]]:
    case = pipeline_engine_runs.Case(name="tied", stage=1)
    engine = pipeline_engine_runs.start(case)
    return engine, lambda number: pipeline_engine_runs.one_step(engine, case, number % 7) and None


def axes_steps(name: str) -> tuple[Any, Callable[[int], None]]:
    case = AXES[name]
    config = parallel_runs.config_of(case) | (OFFLOADED_ACTIVATIONS if name == "offloaded activations" else {})
    engine = windlass.initialize(model=parallel_runs.build(case.model, tied=False), config=config)[0]
    _, reader = engine.data_loading_ranks

    def step(number: int) -> None:
        batch = parallel_runs.batch(number % 7, 0, reader)
        if engine.mesh.pp.size > 1:
            engine.train_batch(iter([batch]))
        else:
            engine.backward(engine(**batch).loss)
            engine.step()

    return engine, step


def begin(case: Any, folder: str) -> tuple[Any, Callable[[int], None]]:
    if isinstance(case, str):
        return pipeline_steps() if case == "pipeline" else axes_steps(case)
    return zero_steps(case, folder)


def settle(engine: Any) -> None:
    """Wait for all transfers, since the last writes of a step continue in the next one."""
    tiers = engine._sharded.tiers
    if tiers.disk is not None:
        tiers.staging.wait_all()
        tiers.disk.io_rates()


def runs(folder: str, cases: list[Any], warm: int, steps: int) -> Iterator[tuple[Any, dict[str, int], dict[str, int]]]:
    for case in cases:
        engine, step = begin(case, folder)
        for number in range(warm):
            step(number)
        settle(engine)
        before = resources()
        for number in range(warm, steps):
            step(number)
        settle(engine)
        after = after_all(before)
        engine.destroy()
        del engine, step
        yield case, before, after


def all_runs(folder: str, cases: list[Any], warm: int, steps: int) -> tuple[list[Any], list[dict[str, int]]]:
    list(runs(folder, cases, 2, 4))  # create everything that exists once per process
    first = resources()
    results = list(runs(folder, cases, warm, steps))
    return results, [first, after_all(first)]


def hold(
    cases: list[Any],
    warm: int,
    steps: int,
    growth: int,
    transport: str,
    folder: Path,
    timeout: float,
    ranks: int = 2,
) -> None:
    work = (all_runs, ranks, str(folder), cases, warm, steps)
    for rank in run_ranks(*work, transport=transport, timeout=timeout, env={"OMP_NUM_THREADS": "1"}):
        result, ends = rank
        for case, before, after in result:
            grown = {name: after[name] - before[name] for name in before}
            assert all(grown[name] <= 0 for name in LASTING), (case, grown)
            assert grown["objects"] < steps - warm, (case, grown)  # less than one object per step
            assert grown["graphs"] <= 0, (case, grown)
            assert grown["memory"] < growth, (case, grown)
        assert all(ends[1][name] <= ends[0][name] for name in LASTING), ends


@pytest.mark.parametrize(
    ("transport", "cases"), [("gloo", [CASES[3], "ep"]), ("shm", ["pipeline", "offloaded activations"])], ids=str
)
def test_steps_leave_no_objects(transport: str, cases: list[Any], tmp_path: Path) -> None:
    hold(cases, 4, 12, 64 << 20, transport, tmp_path, 300)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("case", [*CASES, "pipeline", *AXES], ids=str)
def test_two_thousand_steps_leave_no_resources(case: Any, transport: str, tmp_path: Path) -> None:
    hold([case], 200, 2000, 4 << 20, transport, tmp_path, 3600)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_thousand_steps_over_gloo_without_offload(stage: int, ranks: int, tmp_path: Path) -> None:
    hold([(stage, "none", "none", {})], 200, 2000, 4 << 20, "gloo", tmp_path, 3600, ranks)
