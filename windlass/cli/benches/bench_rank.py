"""Rank of an experiment of `windlass bench`: runs a task and returns its measurements."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from windlass.base.compute_device import local_device, synchronize
from windlass.base.device_memory import copy_counters
from windlass.cli.benches.bench_engines import (
    BenchEngine,
    BenchHyperparameters,
    deepspeed_engine_from_config,
    make_engine,
    preload_engine_modules,
    windlass_engine_from_config,
)
from windlass.cli.benches.bench_models import LanguageModel, linear_stack
from windlass.cli.benches.bench_tasks import BenchTask, TrainingTask, ZeroMemoryTask
from windlass.cli.benches.memory_sampler import MemorySampler
from windlass.comm.bootstrap import init_distributed
from windlass.comm.rank_group import world_group

MEMORY_POINTS = ("model built", "engine built", "before the step", "after the step")


class TaskWorker:
    """Worker of a `RankPool` that runs one task. The constructor is collective.

    Args:
        init_method: rendezvous URL of the ranks, for `init_process_group`.
    """

    def __init__(self, task: BenchTask, rank: int, init_method: str) -> None:
        self._task = task
        init_distributed(init_method=init_method)

    def run(self) -> dict[str, Any]:
        """Run the task. Return this rank's measurements, as plain data."""
        task = self._task
        return measure_zero_memory(task) if isinstance(task, ZeroMemoryTask) else measure_training(task)


def measure_zero_memory(work: ZeroMemoryTask) -> dict[str, Any]:
    """Measure peak memory until each of `MEMORY_POINTS`, the parameter sum after the steps, and the last loss."""
    device, rank = local_device(), dist.get_rank()
    preload_engine_modules(work.engine)
    world_group().barrier()  # opens the connections, so that their buffers are part of the baseline
    watch = MemorySampler(device)
    peaks = []
    torch.manual_seed(0)
    model = linear_stack(work.width, work.depth).to(device)
    peaks.append(watch.peak_bytes())
    parameters = sum(p.numel() for p in model.parameters())
    recipe = BenchHyperparameters(lr=0.01, max_grad_norm=0.0, micro_batch=work.batch)
    trainee = make_engine(work.engine, model, list(model), recipe, device)
    peaks.append(watch.peak_bytes())
    loss = torch.zeros(())
    for step in range(work.steps):
        draw = torch.Generator().manual_seed(1000 * rank + step)
        rows, requested = (torch.randn(work.batch, work.width, generator=draw).to(device) for _ in range(2))
        loss = functional.mse_loss(trainee.forward(rows), requested)
        trainee.backward(loss)
        if step == 0:
            peaks.append(watch.peak_bytes())
        trainee.step()
        if step == 0:
            peaks.append(watch.stop())
    return {
        "memory_kind": watch.counter_name,
        "parameters": parameters,
        "peaks": dict(zip(MEMORY_POINTS, peaks, strict=True)),
        "parameter_sum": trainee.parameter_sum(),
        "loss": loss.item(),
    }


def measure_training(work: TrainingTask) -> dict[str, Any]:
    """Train the configurations alternately. Measure seconds of timed steps, losses of all steps, and bytes copied in
    the last step; also peak memory if requested."""
    device = local_device()
    preload_engine_modules("windlass")
    if any(config.get("engine") == "deepspeed" for config in work.configs.values()):
        preload_engine_modules("ds")
    world_group().barrier()
    watch = MemorySampler(device) if work.measure_memory else None
    trainees: dict[str, BenchEngine] = {}
    parameters = 0
    for label, config in work.configs.items():
        torch.manual_seed(0)
        model = LanguageModel(work.vocabulary, work.hidden, work.layers, work.length).to(device)
        parameters = sum(p.numel() for p in model.parameters())
        trainees[label] = _build_engine(config, model, work, device)
        del model
    seconds: dict[str, list[float]] = {label: [] for label in trainees}
    losses: dict[str, list[float]] = {label: [] for label in trainees}
    copied: dict[str, dict[str, int]] = {}
    labels = list(trainees)
    for round_index in range(work.rounds):
        # reverse every second round, so that slow drift of the machine affects all configurations equally
        for label in labels if round_index % 2 == 0 else reversed(labels):
            for step in range(work.steps + 1):
                before = _copied_bytes(trainees[label])
                took, loss = _timed_step(trainees[label], work, device, len(losses[label]))
                losses[label].append(loss)
                if step:
                    seconds[label].append(took)
                    now = _copied_bytes(trainees[label])
                    copied[label] = {key: now[key] - before[key] for key in now}  # equal in all steps but the first
    reports = {label: one.engine.report() if one.engine else {} for label, one in trainees.items()}
    return {
        "memory_kind": watch.counter_name if watch else None,
        "memory": watch.stop() if watch else None,
        "parameters": parameters,
        "seconds": seconds,
        "losses": losses,
        "copied": copied,
        "transport": {label: report.get("transport", "none") for label, report in reports.items()},
        "delayed_update": {label: report.get("delayed_update") for label, report in reports.items()},
        "work": asdict(work),
    }


def _build_engine(
    config: dict[str, Any], model: LanguageModel, work: TrainingTask, device: torch.device
) -> BenchEngine:
    if config.get("engine") == "none":
        return make_engine("none", model, [], BenchHyperparameters(1e-3, 1.0, work.batch), device)
    if config.get("engine") == "deepspeed":
        return deepspeed_engine_from_config(model, config["config"])
    return windlass_engine_from_config(model, config)


def _copied_bytes(trainee: BenchEngine) -> dict[str, int]:
    """Return the bytes that this rank has copied so far, by direction. Empty for engines that do not count them."""
    if trainee.engine is None:
        return {}
    disk = trainee.engine.report()["disk"]
    return {
        "to_device": copy_counters.to_device,
        "to_host": copy_counters.to_host,
        "from_disk": disk.disk_read_bytes,
        "to_disk": disk.disk_write_bytes,
    }


def _timed_step(trainee: BenchEngine, work: TrainingTask, device: torch.device, number: int) -> tuple[float, float]:
    # use only two batches, so that the loss falls
    draw = torch.Generator().manual_seed(1000 * dist.get_rank() + number % 2)
    tokens = torch.randint(0, work.vocabulary, (work.batch, work.length), generator=draw).to(device)
    synchronize(device)
    world_group().barrier()
    start = time.perf_counter()
    loss = trainee.forward(tokens)
    trainee.backward(loss)
    trainee.step()
    value = float(loss.detach())
    synchronize(device)
    return time.perf_counter() - start, value
