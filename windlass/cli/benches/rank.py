"""One rank of an experiment: does the work in a folder's work.json, and leaves there what it measured."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from windlass.base.device import local_device, synchronize
from windlass.base.memory import transfers
from windlass.base.text import say
from windlass.cli.benches.memory import MemoryWatch
from windlass.cli.benches.models import LanguageModel, linear_stack
from windlass.cli.benches.trainee import (
    Recipe,
    Trainee,
    from_config,
    from_deepspeed_config,
    import_what_is_needed,
    make,
)
from windlass.cli.benches.work import KINDS, TrainingWork, ZeroMemoryWork
from windlass.cli.failure import explain
from windlass.comm.bootstrap import init_distributed

POINTS = ("model built", "engine built", "before the step", "after the step")


def main(folder: Path) -> None:
    """Do the work in `folder` and leave `rankN.json` there; an error that was foreseen ends in one message."""
    told = json.loads((folder / "work.json").read_text())
    work = KINDS[told["kind"]](**told["work"])
    try:
        init_distributed()
        measured = zero_memory(work) if isinstance(work, ZeroMemoryWork) else training(work)
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        say(f"windlass: {message}", to_stderr=True)
        sys.exit(1)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def zero_memory(work: ZeroMemoryWork) -> dict[str, Any]:
    """The most memory taken until each of `POINTS`, the sum of parameters after the steps, and the last loss."""
    device, rank = local_device(), dist.get_rank()
    import_what_is_needed(work.engine)
    dist.barrier()  # connections and their buffers belong to the baseline
    watch = MemoryWatch(device)
    peaks = []
    torch.manual_seed(0)
    model = linear_stack(work.width, work.depth).to(device)
    peaks.append(watch.peak())
    parameters = sum(p.numel() for p in model.parameters())
    recipe = Recipe(lr=0.01, clip=0.0, micro_batch=work.batch)
    trainee = make(work.engine, model, list(model), recipe, device)
    peaks.append(watch.peak())
    loss = torch.zeros(())
    for step in range(work.steps):
        draw = torch.Generator().manual_seed(1000 * rank + step)
        rows, wanted = (torch.randn(work.batch, work.width, generator=draw).to(device) for _ in range(2))
        loss = functional.mse_loss(trainee.call(rows), wanted)
        trainee.backward(loss)
        if step == 0:
            peaks.append(watch.peak())
        trainee.update()
        if step == 0:
            peaks.append(watch.stop())
    return {
        "memory_kind": watch.kind,
        "parameters": parameters,
        "peaks": dict(zip(POINTS, peaks, strict=True)),
        "parameter_sum": trainee.parameter_sum(),
        "loss": loss.item(),
    }


def training(work: TrainingWork) -> dict[str, Any]:
    """Seconds, losses and copies of every step of every configuration, in turns; memory, if watched."""
    device = local_device()
    import_what_is_needed("windlass")
    if any(config.get("engine") == "deepspeed" for config in work.configs.values()):
        import_what_is_needed("ds")
    dist.barrier()
    watch = MemoryWatch(device) if work.watch else None
    trainees: dict[str, Trainee] = {}
    parameters = 0
    for label, config in work.configs.items():
        torch.manual_seed(0)
        model = LanguageModel(work.vocabulary, work.hidden, work.layers, work.length).to(device)
        parameters = sum(p.numel() for p in model.parameters())
        trainees[label] = _under(config, model, work, device)
        del model
    seconds: dict[str, list[float]] = {label: [] for label in trainees}
    losses: dict[str, list[float]] = {label: [] for label in trainees}
    copied: dict[str, dict[str, int]] = {}
    labels = list(trainees)
    for turn in range(work.rounds):
        for label in labels if turn % 2 == 0 else reversed(labels):  # drift of the machine hits all alike
            for step in range(work.steps + 1):
                before = _moved(trainees[label])
                took, loss = _step(trainees[label], work, device, len(losses[label]))
                losses[label].append(loss)
                if step:
                    seconds[label].append(took)
                    now = _moved(trainees[label])
                    copied[label] = {key: now[key] - before[key] for key in now}  # alike in all steps but the first
    reports = {label: one.engine.report() if one.engine else {} for label, one in trainees.items()}
    return {
        "memory_kind": watch.kind if watch else None,
        "memory": watch.stop() if watch else None,
        "parameters": parameters,
        "seconds": seconds,
        "losses": losses,
        "copied": copied,
        "transport": {label: said.get("transport", "none") for label, said in reports.items()},
        "delayed_update": {label: said.get("delayed_update") for label, said in reports.items()},
        "work": asdict(work),
    }


def _under(config: dict[str, Any], model: LanguageModel, work: TrainingWork, device: torch.device) -> Trainee:
    if config.get("engine") == "none":
        return make("none", model, [], Recipe(1e-3, 1.0, work.batch), device)
    if config.get("engine") == "deepspeed":
        return from_deepspeed_config(model, config["config"])
    return from_config(model, config)


def _moved(trainee: Trainee) -> dict[str, int]:
    """Bytes that this rank copied so far, by where they went; nothing of who does not tell."""
    if trainee.engine is None:
        return {}
    disk = trainee.engine.report()["disk"]
    return {
        "to_device": transfers.to_device,
        "to_host": transfers.to_host,
        "from_disk": disk.disk_read_bytes,
        "to_disk": disk.disk_write_bytes,
    }


def _step(trainee: Trainee, work: TrainingWork, device: torch.device, number: int) -> tuple[float, float]:
    draw = torch.Generator().manual_seed(1000 * dist.get_rank() + number % 2)  # two batches, so that there is progress
    tokens = torch.randint(0, work.vocabulary, (work.batch, work.length), generator=draw).to(device)
    synchronize(device)
    dist.barrier()
    start = time.perf_counter()
    loss = trainee.call(tokens)
    trainee.backward(loss)
    trainee.update()
    value = float(loss.detach())
    synchronize(device)
    return time.perf_counter() - start, value


if __name__ == "__main__":
    main(Path(sys.argv[1]))
