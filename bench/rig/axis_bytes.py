"""Ranks that train two steps on each mesh, and return the bytes that its axes moved in the second."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from rig.axis_cases import LENGTH, MICRO_BATCHES, SAMPLES, Case, Line, Moved, compare
from rig.models import build, samples

Say = Callable[[str], None]
Told = tuple[int, int, Moved]  # number of the case, pipeline stage, and bytes moved


def count(cases: Sequence[Case], say: Say) -> list[Line]:
    """Return the formulas and the measured bytes of every rank of every case.

    Ranks of a stage with equal values are one line.
    """
    from torch.multiprocessing.spawn import spawn

    lines: list[Line] = []
    for ranks in sorted({case.ranks for case in cases}):
        here = [case for case in cases if case.ranks == ranks]
        say(f"bytes: {len(here)} meshes of {ranks} ranks")
        answers = multiprocessing.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory(prefix="windlass-bench-") as folder:
            spawn(_rank, (ranks, here, f"file://{folder}/meeting", answers), nprocs=ranks)
            results: list[Told] = answers.get()
        for number, case in enumerate(here):
            local = [compare(case, pipe, moved) for which, pipe, moved in results if which == number]
            alike = {line for each in local for line in each}
            lines += sorted(alike, key=lambda line: (line.pipe, line.axis, line.operation, line.measured))
    return lines


def _rank(rank: int, ranks: int, cases: list[Case], meeting: str, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    results: list[Told] = []
    for number, case in enumerate(cases):
        pipe, moved = moved_by(case)
        results.append((number, pipe, moved))
    received: list[Any] = [None] * ranks
    dist.all_gather_object(received, results)
    if rank == 0:
        answers.put([item for each in received for item in each])
    dist.barrier()
    dist.destroy_process_group()


def moved_by(case: Case) -> tuple[int, Moved]:
    """Return this rank's pipeline stage, and the bytes that it received in the second step. Collective."""
    import windlass

    model = build(case.sizes)
    if case.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    engine: Any = windlass.initialize(model=model, config=config_of(case))[0]
    for step in range(2):
        for axis in engine.mesh.axes.values():
            axis.traffic.reset()
        _train(engine, case, step)
    moved = {name: dict(axis.traffic.bytes_moved) for name, axis in engine.mesh.axes.items() if axis.size > 1}
    report = engine.report()
    moved["data"] = dict(report["bytes_moved"])
    # Without replicas, `replicate` counts only sums of gradients over other axes, which no formula includes.
    if case.grid.dp_replicate == 1:
        moved["data"].pop("replicate", None)
    pipe = engine.mesh.pp.index
    engine.destroy()
    return pipe, moved


def config_of(case: Case) -> dict[str, Any]:
    """Return the configuration of windlass. Nothing stays unsharded between forward and backward, so stage 3 gathers
    twice."""
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": case.stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 0,
        },
        "parallel": dict(case.axes),
        "pipeline": dict(case.pipeline),
        "comm": {"transport": "gloo"},  # on shared memory a gather moves nothing
        "steps_per_print": 10**9,
    }


def _train(engine: Any, case: Case, step: int) -> None:
    reader = engine.data_loading_ranks[1]
    batches = []
    for micro in range(MICRO_BATCHES):
        tokens = samples(case.sizes.vocabulary, SAMPLES, LENGTH, 1000 * step + 100 * micro + reader)
        batches.append({"input_ids": tokens, "labels": tokens})
    if engine.mesh.pp.size > 1:
        engine.train_batch(iter(batches))
        return
    for batch in batches:
        engine.backward(engine(**batch).loss)
        engine.step()
