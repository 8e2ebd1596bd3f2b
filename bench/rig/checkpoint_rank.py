"""Rank that trains a model and saves its states with each compared method in turn."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import windlass
from windlass.cli.benches.bench_engines import import_deepspeed

Wait = Callable[[], None]
# Function that returns once training may continue; its result is a function that waits until all data is durable.
Save = Callable[[Path], Wait]


def ways(engine: Any, tensors: dict[str, torch.Tensor], rival: Any | None) -> dict[str, Save]:
    """Return every method to save, by name.

    Args:
        tensors: Tensors that this rank writes with windlass.
        rival: DeepSpeed's engine of the same model, if it is compared.
    """
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    named = {f"rank{rank}/{name}": tensor for name, tensor in tensors.items()}

    def windlass_save(folder: Path, *, blocking: bool) -> Wait:
        engine.save_checkpoint(str(folder), tag="t", blocking=blocking)
        return engine.finish_checkpoint

    def torch_save(folder: Path, *, crc32: bool) -> Wait:
        torch.serialization.set_crc32_options(crc32)
        with open(folder / f"rank{rank}.pt", "wb") as file:
            torch.save(named, file)
            file.flush()
            os.fsync(file.fileno())
        return _nothing

    def dcp_save(folder: Path) -> Wait:
        dcp.save(named, storage_writer=dcp.FileSystemWriter(folder))
        return _nothing

    def dcp_async(folder: Path) -> Wait:
        future: Any = dcp.async_save(named, storage_writer=dcp.FileSystemWriter(folder), process_group=group)
        return lambda: future.result() and None

    def deepspeed_save(folder: Path) -> Wait:
        assert rival is not None
        rival.save_checkpoint(str(folder), tag="t")
        for file in folder.rglob(f"*_rank_{rank}_*.pt") if rank else folder.rglob("*.pt"):
            _sync(file)
        dist.barrier()
        return _nothing

    return {
        "windlass": lambda folder: windlass_save(folder, blocking=True),
        "windlass async": lambda folder: windlass_save(folder, blocking=False),
        "torch.save": lambda folder: torch_save(folder, crc32=True),
        "torch.save, no crc32": lambda folder: torch_save(folder, crc32=False),
        "DCP": dcp_save,
        "DCP async": dcp_async,
        "DeepSpeed": deepspeed_save,
    }


def _nothing() -> None:
    return


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Trial:
    """Timed saves and steps of one run.

    Args:
        step: trains one step.
    """

    def __init__(self, folder: Path, step: Callable[[], None], steps: int) -> None:
        self._folder, self._step, self._steps, self._count = folder, step, steps, 0

    def measure(self, save: Save, found: dict[str, list[float]]) -> None:
        """Time a save alone, and a save followed by steps."""
        plain = self._train()
        place = self._place()
        begin = time.perf_counter()
        save(place)()
        found["seconds"].append(time.perf_counter() - begin)
        self._remove(place)
        place = self._place()
        begin = time.perf_counter()
        wait = save(place)
        found["blocked"].append(time.perf_counter() - begin)
        found["steps"].append(sum(self._train()))
        wait()
        found["plain_steps"].append(sum(plain))
        found["plain_step"].append(sorted(plain)[len(plain) // 2])
        self._remove(place)

    def _train(self) -> list[float]:
        seconds = []
        for _ in range(self._steps):
            begin = time.perf_counter()
            self._step()
            seconds.append(time.perf_counter() - begin)
        return seconds

    def _place(self) -> Path:
        self._count += 1
        place = self._folder / f"save{self._count}"
        place.mkdir(exist_ok=True)
        dist.barrier()
        return place

    def _remove(self, place: Path) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(place)
        dist.barrier()


class ResidualLinear(torch.nn.Linear):
    """Linear layer whose input is added to its output.

    A chain of plain linear layers makes activations and gradients smaller from layer to layer and from step to step,
    until steps compute with denormal numbers, which take far longer on some processors.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return `input` plus the layer's output."""
        return input + super().forward(input)


def _model(work: dict[str, Any]) -> torch.nn.Module:
    width = work["width"]
    return torch.nn.Sequential(*(ResidualLinear(width, width, bias=False) for _ in range(work["layers"])))


def _rival(work: dict[str, Any], rows: torch.Tensor) -> Any:
    """Return DeepSpeed's engine at the same stage, with torch's AdamW, after one step, which creates its states."""
    deepspeed, model = import_deepspeed(), _model(work)
    config = {
        "train_micro_batch_size_per_gpu": work["batch"],
        "zero_optimization": {"stage": work["stage"], "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    rival, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), config=config
    )
    rival.backward(rival(rows).square().mean())
    rival.step()
    return rival


def main(folder: Path) -> None:
    """Run the work in `folder`/work.json, and write the result next to it."""
    work = json.loads((folder / "work.json").read_text())
    torch.manual_seed(0)
    width = work["width"]
    model = _model(work)
    config = {
        "train_micro_batch_size_per_gpu": work["batch"],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": work["stage"], "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = windlass.initialize(model=model, config=config)
    rank, rows, target = dist.get_rank(), torch.randn(work["batch"], width), torch.randn(work["batch"], width)

    def step() -> None:
        engine.backward((engine(rows) - target).square().mean())
        engine.step()

    step()
    engine.save_checkpoint(str(folder / "first"), tag="t")
    dist.barrier()
    tensors = load_file(folder / "first" / "t" / f"rank_{rank:05d}.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    rival = _rival(work, rows) if "DeepSpeed" in work["names"] else None
    saves = {name: save for name, save in ways(engine, tensors, rival).items() if name in work["names"]}
    results: dict[str, dict[str, list[float]]] = {}
    trial = Trial(folder, step, work["steps"])
    for number in range(work["rounds"] + 1):  # the first round warms up
        for name, save in saves.items() if number % 2 == 0 else reversed(saves.items()):
            into: dict[str, list[float]] = {
                key: [] for key in ("seconds", "blocked", "steps", "plain_steps", "plain_step")
            }
            trial.measure(save, into)
            if number:
                kept = results.setdefault(name, {key: [] for key in into})
                for key, values in into.items():
                    kept[key] += values
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    (folder / f"rank{rank}.json").write_text(json.dumps({"bytes": nbytes, "saves": results}))
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
