"""Cost of the disk tier's checksums: alternating steps of two engines, with and without them, and the CPU time of the
kernel.

python bench/disk_checksums.py --path /mnt/nvme
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

import windlass
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.kernels.kernel_dispatch import apply_updates
from windlass.kernels.page_sums import PageSums
from windlass.kernels.update_rules import AdamRule
from windlass.kernels.update_tensors import UpdateTensors
from windlass.storage.io_engine import native_module

_RESULTS = Path(__file__).parent / "results" / "checksums.json"
_KERNEL_BYTES = 256 << 20
_UPDATE_NUMEL = 8 << 20
_TARGET_RATIO = 1.02


def main(
    path: Annotated[Path, typer.Option(help="A folder on the disk to use.")] = Path("."),
    width: Annotated[int, typer.Option(min=64, help="Width of the layers; each has width^2 parameters.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 12,
    batch: Annotated[int, typer.Option(min=1, help="Rows per step.")] = 1024,
    rounds: Annotated[int, typer.Option(min=6, help="Rounds of two steps of each engine.")] = 15,
    in_update: Annotated[bool, typer.Option(help="Sum the pages of the optimizer in the update.")] = True,
    results: Annotated[Path, typer.Option(help="The JSON file.")] = _RESULTS,
) -> None:
    """Print the ratios of all rounds, their median with its confidence interval, and the CPU time of the kernel; write
    the JSON.

    On a shared machine rounds differ by more than the cost to be measured. The computed cost varies less: the
    checksummed bytes of a step are counted, and the rates of the kernel and of the update are measured in CPU seconds
    of a thread. The exit code is 1 if both exceed the target: the computed cost, and the lower end of the interval.
    """
    rates, update_rate = _time_kernel(), _time_update()
    with tempfile.TemporaryDirectory(prefix="windlass-checksums-", dir=path) as folder:
        moved: list[int] = []
        updated: list[int] = []
        steps = {
            True: _make_step(f"{folder}/True", width, layers, batch, moved, updated if in_update else None),
            False: _make_step(f"{folder}/False", width, layers, batch, None, None),
        }
        for step in steps.values():
            step(), step()
        moved.clear()
        updated.clear()
        seconds = dict[bool, list[float]]({True: [], False: []})
        for _ in range(rounds):
            # The last writes of a step delay the next step, whichever engine runs it. In this order each engine follows
            # itself once and the other engine once in a round.
            for checks in (True, False, False, True):
                seconds[checks].append(steps[checks]())
    nbytes, of_updates = sum(moved) / (2 * rounds), sum(updated) / (2 * rounds)
    ratios = [item / other for item, other in zip(_in_pairs(seconds[True]), _in_pairs(seconds[False]), strict=True)]
    middle, (low, high), sure = statistics.median(ratios), *interval(ratios)
    rate = max(rates.values()) if rates else math.nan
    kernel = (nbytes - of_updates) / rate + of_updates / update_rate
    shortest = min(seconds[True] + seconds[False])
    account = {
        "bytes_a_step": nbytes,
        "of_these_in_updates": of_updates,
        "bytes_a_second": rate,
        "bytes_a_second_in_updates": update_rate,
        "processor_seconds_a_step": kernel,
        "of_the_median_step": kernel / statistics.median(seconds[False]),
        "of_the_shortest_step": kernel / shortest,
    }
    say = bench_console().print
    say(f"{layers * width**2 / 1e6:.0f}M parameters, all on disk, {rounds} rounds of two steps of each")
    for checks, name in ((False, "without"), (True, "with")):
        say(f"  {name} checksums: median {statistics.median(seconds[checks]):.3f} s a step")
    say(f"  ratios {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    say(f"  median ratio {middle:.3f}, with {100 * sure:.0f} % confidence in [{low:.3f}, {high:.3f}]")
    say(
        f"  summed {(nbytes - of_updates) / 1e9:.2f} GB a step at {rate / 1e9:.1f} GB/s of one core, "
        f"{of_updates / 1e9:.2f} GB in updates at {update_rate / 1e9:.1f}: {1000 * kernel:.1f} ms"
    )
    say(
        f"  which is {100 * account['of_the_median_step']:.2f} % of the median step, "
        f"{100 * account['of_the_shortest_step']:.2f} % of the shortest one"
    )
    result = {"median": middle, "interval": [low, high], "certainty": sure, "ratios": ratios}
    shared = os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
    received = {
        "machine_was_shared": shared,
        "paired_ratios": result,
        "account": account,
        "kernel_bytes_a_second": rates,
    }
    write_result(results, received)
    missed = low > _TARGET_RATIO and account["of_the_shortest_step"] > _TARGET_RATIO - 1
    say(
        f"  promised: {_TARGET_RATIO}: {'MISSED' if missed else 'not contradicted' if high > _TARGET_RATIO else 'held'}"
    )
    raise typer.Exit(missed)


def interval(values: Sequence[float]) -> tuple[tuple[float, float], float]:
    """Return a confidence interval of the median of the distribution that `values` are drawn from, and its confidence.

    The bounds are two of the values. The confidence is at least 95 % for any distribution, but lower with fewer than
    six values.
    """
    count, ordered = len(values), sorted(values)
    outside, number = 0.0, 0  # probability that fewer than `number` draws lie below the median, or above it
    while True:
        more = outside + 2 * math.comb(count, number) / 2**count
        if more > 0.05 or number >= (count - 1) // 2:
            break
        outside, number = more, number + 1
    left = max(number - 1, 0)
    return (ordered[left], ordered[-1 - left]), 1 - (outside or more)


def _in_pairs(values: Sequence[float]) -> list[float]:
    """Return the sums of values 0 and 1, 2 and 3, and so on."""
    return [first + second for first, second in zip(values[::2], values[1::2], strict=True)]


def _make_step(
    folder: str, width: int, layers: int, batch: int, moved: list[int] | None, updated: list[int] | None
) -> Callable[[], float]:
    """Return a function that runs one training step of a new engine and returns its seconds.

    Args:
        moved: receives the bytes of each checksummed transfer; None: no checksums.
        updated: receives the bytes that updates checksum in their own pass; None: updates checksum nothing.
    """
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
    disk: Any = engine._sharded.tiers.disk
    spans, page_sums = disk._transfers._spans, disk.page_sums

    def noted(*where: Any) -> Any:
        result = spans(*where)
        if moved is None:
            return [(*span[:4], 0) for span in result]
        moved.append(sum(span[3] for span in result))
        return result

    def noted_sums(*where: Any) -> Any:
        sums = None if updated is None else page_sums(*where)
        if updated is not None and sums is not None:
            updated.append(2 * sums.memory.numel())  # bytes of the read and of the write
        return sums

    disk._transfers._spans, disk.page_sums = noted, noted_sums
    rows = torch.randn(batch, width, dtype=torch.bfloat16)

    def step() -> float:
        begin = time.perf_counter()
        engine.backward(engine(rows).float().square().mean())
        engine.step()
        return time.perf_counter() - begin

    return step


def _time_update() -> float:
    """Return the bytes that an Adam update reads and writes, divided by the CPU seconds that their checksums add."""
    numel = _UPDATE_NUMEL
    record = torch.zeros(12 * numel, dtype=torch.uint8)
    record = record[-record.data_ptr() % 4096 :][: 12 * numel - 4096]
    parameter, *states = record.view(torch.float32)[: 3 * (numel - 1024)].chunk(3)
    gradient, copy = torch.randn(numel - 1024).bfloat16(), torch.empty(numel - 1024, dtype=torch.bfloat16)
    rule = AdamRule(1e-3, (0.9, 0.999), 1e-8, 0.0, decoupled=True, amsgrad=False, maximize=False, step=1)
    sums = PageSums(record, torch.zeros(record.numel() // 4096, dtype=torch.int32))
    took: dict[bool, list[float]] = {True: [], False: []}
    for checks in (True, False) * 10:
        sums.states.zero_()
        begin = time.thread_time()
        tensors = UpdateTensors(parameter, gradient, tuple(states), low_precision_copy=copy)
        apply_updates(rule, [tensors], threads=1, page_sums=[sums] if checks else [])
        took[checks].append(time.thread_time() - begin)
    return 24 * (numel - 1024) / (statistics.median(took[True]) - statistics.median(took[False]))


def _time_kernel() -> dict[str, float]:
    """Return the bytes per CPU second of the thread, for each instruction set of the kernel."""
    module, why = native_module()
    if module is None:
        bench_console().print(f"no native checksums: {why}")
        return {}
    source, into = (
        torch.randint(0, 256, (_KERNEL_BYTES,), dtype=torch.uint8),
        torch.zeros(_KERNEL_BYTES, dtype=torch.uint8),
    )
    works: dict[str, Callable[[], Any]] = {"a copy (torch, one thread)": lambda: into.copy_(source)}
    for name in module.checksum_paths():
        works[name] = lambda name=name: module.page_checksums(source.data_ptr(), _KERNEL_BYTES, name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rates = {}
    for name, work in works.items():
        took = []
        for _ in range(5):
            begin = time.thread_time()
            work()
            took.append(time.thread_time() - begin)
        rates[name] = _KERNEL_BYTES / min(took)
        bench_console().print(f"{name}: {rates[name] / 1e9:.1f} GB/s")
    torch.set_num_threads(threads)
    rates.pop("a copy (torch, one thread)")
    return rates


if __name__ == "__main__":
    typer.run(main)
