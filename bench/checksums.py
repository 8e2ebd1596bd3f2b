"""What the checksums of the disk tier cost: steps of two engines by turns, with and without them, and the kernel alone.

python bench/checksums.py --path /mnt/nvme
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

import windlass
from windlass.cli.benches.screen import screen
from windlass.storage.engine import native

_BYTES = 256 << 20
_PROMISED = 1.02


def main(
    path: Annotated[Path, typer.Option(help="A folder on the disk to use.")] = Path("."),
    width: Annotated[int, typer.Option(min=64, help="Of the layers; each has width^2 parameters.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="How many.")] = 12,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 1024,
    rounds: Annotated[int, typer.Option(min=3, help="Steps of each engine.")] = 9,
) -> None:
    """Print both rates and the ratio of each round; the exit code is 1 where the median ratio is above 1.02."""
    _kernel()
    with tempfile.TemporaryDirectory(prefix="windlass-checksums-", dir=path) as folder:
        steps = {checks: _stepper(f"{folder}/{checks}", width, layers, batch, checks) for checks in (True, False)}
        for step in steps.values():
            step(), step()
        ratios, work = [], []
        seconds = dict[bool, list[float]]({True: [], False: []})
        for number in range(rounds):
            found = {checks: steps[checks]() for checks in ((True, False) if number % 2 else (False, True))}
            ratios.append(found[True][0] / found[False][0])
            work.append(found[True][1] / found[False][1])
            for checks, (took, _) in found.items():
                seconds[checks].append(took)
    middle, least = statistics.median(ratios), min(seconds[True]) / min(seconds[False])
    screen().print(f"{layers * width**2 / 1e6:.0f}M parameters, all on disk, {rounds} steps of each by turns")
    for checks, name in ((False, "without"), (True, "with")):
        screen().print(f"  {name} checksums: median {statistics.median(seconds[checks]):.3f} s a step")
    screen().print(f"  ratios {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    screen().print(f"  ratios of processor time {', '.join(f'{ratio:.3f}' for ratio in work)}")
    screen().print(f"  median ratio of processor time {statistics.median(work):.3f}")
    verdict = "held" if middle <= _PROMISED else "MISSED"
    screen().print(f"  median ratio {middle:.3f}, of the shortest steps {least:.3f} (promised: {_PROMISED}: {verdict})")
    raise typer.Exit(middle > _PROMISED)


def _stepper(folder: str, width: int, layers: int, batch: int, checks: bool) -> Callable[[], tuple[float, float]]:
    """One training step of an engine of its own; returns its seconds, and those of the processor in all threads."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(layers)))
    there = {"device": "nvme", "nvme_path": folder}
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "offload_param": there,
            "offload_optimizer": there,
        },
    }
    engine, *_ = windlass.initialize(model=model, config=config)
    if not checks:
        mover = engine._sharded.homes.disk._mover
        spans = mover._spans
        mover._spans = lambda *where: [(*span[:4], 0) for span in spans(*where)]
    rows = torch.randn(batch, width, dtype=torch.bfloat16)

    def step() -> tuple[float, float]:
        begin, busy = time.perf_counter(), time.process_time()
        engine.backward(engine(rows).float().square().mean())
        engine.step()
        return time.perf_counter() - begin, time.process_time() - busy

    return step


def _kernel() -> None:
    module, why = native()
    if module is None:
        screen().print(f"no native checksums: {why}")
        return
    source, into = torch.randint(0, 256, (_BYTES,), dtype=torch.uint8), torch.zeros(_BYTES, dtype=torch.uint8)
    works: dict[str, Callable[[], Any]] = {"a copy (torch, one thread)": lambda: into.copy_(source)}
    for name in module.checksum_paths():
        works[f"checksums by {name}"] = lambda name=name: module.page_checksums(source.data_ptr(), _BYTES, name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, work in works.items():
        took = []
        for _ in range(5):
            begin = time.perf_counter()
            work()
            took.append(time.perf_counter() - begin)
        screen().print(f"{name}: {_BYTES / min(took) / 1e9:.1f} GB/s")
    torch.set_num_threads(threads)


if __name__ == "__main__":
    typer.run(main)
