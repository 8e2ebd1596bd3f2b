"""AdamW in host memory: native code in one pass, compared with torch's fused and foreach steps and DeepSpeedCPUAdam.

python bench/cpu_adamw.py                    # 50M elements, all threads: some minutes, 4 GB
python bench/cpu_adamw.py --elements 1e6 --rounds 2 --threads 1
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.cli.benches.deepspeed_baseline import explain_build_lock
from windlass.kernels.kernel_dispatch import get_active_kernel_path, list_kernel_paths
from windlass.kernels.update_tensors import SCALE_BLOCK
from windlass.optim import CPUAdam

_RESULTS = Path(__file__).parent / "results"
_CODED = 2 * (1 + 4 / SCALE_BLOCK)  # bytes of two 8-bit moments of one element
# Bytes to move per element: parameter and two moments (fp32) are read and written; an fp32 gradient is read, or (mixed)
# a bf16 gradient is read and a bf16 copy of the parameter is written.
_FP32, _MIXED = 28.0, 28.0
_ROOF = "roof: four arrays in place"


@dataclass(frozen=True)
class Case:
    """Implementation of a step."""

    run: Callable[[], object]
    bytes_per_element: float


@dataclass(frozen=True)
class Target:
    """Target: `case` is at least `speed` times as fast as `rival`."""

    case: str
    rival: str
    speed: float


TARGETS = (
    Target("fp32: windlass", "fp32: torch fused", 0.95),
    Target("mixed: windlass", "mixed: torch fused and casts", 1.4),
    Target("mixed: windlass", "mixed: DeepSpeedCPUAdam and casts", 2.0),
    Target("8-bit states: windlass", "fp32: windlass", 1.0),
    Target("8-bit states, mixed: windlass", "fp32: windlass", 1.0),
)


class Arrays:
    """Tensors that all cases share: a parameter, its gradient in fp32 and bf16, a copy of the parameter in bf16."""

    def __init__(self, elements: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameter = torch.nn.Parameter(torch.randn(elements, generator=generator))
        self.gradient = torch.randn(elements, generator=generator)
        self.half_gradient = self.gradient.bfloat16()
        self.half_parameter = torch.zeros(elements, dtype=torch.bfloat16)
        self.parameter.grad = self.gradient

    def with_casts(self, step: Callable[[], object]) -> Callable[[], object]:
        """Return the step of an fp32-only optimizer: the gradient is cast before it, and the parameter after it."""

        def run() -> None:
            self.gradient.copy_(self.half_gradient)
            step()
            self.half_parameter.copy_(self.parameter.detach())

        return run


def main(
    elements: Annotated[float, typer.Option(min=1, help="Elements of the parameter.")] = 5e7,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each case.")] = 9,
    calls: Annotated[int, typer.Option(min=1, help="Timed steps per round, after an untimed one.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="[torch's own number]")] = None,
    every_path: Annotated[bool, typer.Option("--every-path", help="Measure the other instruction sets too.")] = False,
    name: Annotated[str, typer.Option(help="Name of the file in --results.")] = "cpu_optimizer",
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = _RESULTS,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 1 if a target is missed.")] = False,
) -> None:
    """Time the cases alternately, print a table and the ratios, write the JSON."""
    if threads is not None:
        torch.set_num_threads(threads)
    console, count = bench_console(), int(elements)
    cases, absent = _make_cases(Arrays(count), every_path)
    seconds = _time_interleaved(cases, rounds, calls)
    console.print(
        f"{count:,} elements, {torch.get_num_threads()} threads, windlass: {get_active_kernel_path()}", soft_wrap=True
    )
    console.print(_result_table(cases, seconds, count))
    for line in absent:
        console.print(line, soft_wrap=True)
    kept = [_check_target(target, seconds) for target in TARGETS if target.rival in seconds]
    for line, _ in kept:
        console.print(line, soft_wrap=True)
    result = {
        "bench": "cpu_optimizer",
        "elements": count,
        "threads": torch.get_num_threads(),
        "path": str(get_active_kernel_path()),
        "bytes_per_element": {case: cases[case].bytes_per_element for case in cases},
        "seconds": seconds,
        "ratios": {f"{t.case} / {t.rival}": _target_ratio(t, seconds) for t in TARGETS if t.rival in seconds},
        "absent": absent,
    }
    console.print(f"written: {write_result(results / f'{name}.json', result)}", soft_wrap=True)
    if strict and not all(good for _, good in kept):
        raise typer.Exit(1)


def _make_cases(arrays: Arrays, every_path: bool) -> tuple[dict[str, Case], list[str]]:
    four = [torch.ones(arrays.parameter.numel()) for _ in range(4)]
    cases = {
        _ROOF: Case(lambda: [array.add_(1.0) for array in four], 32.0),
        "fp32: windlass": Case(_windlass_step(arrays), _FP32),
        "mixed: windlass": Case(_windlass_step(arrays, mixed=True), _MIXED),
        "8-bit states: windlass": Case(_windlass_step(arrays, state_dtype="8bit"), 12 + 2 * _CODED),
        "8-bit states, mixed: windlass": Case(_windlass_step(arrays, True, "8bit"), 12 + 2 * _CODED),
        "bf16 states, mixed: windlass": Case(_windlass_step(arrays, True, "bf16"), 20.0),
    }
    if every_path:
        for path in list_kernel_paths()[1:-1]:
            cases[f"fp32: windlass, {path}"] = Case(_windlass_step(arrays, path=path), _FP32)
            cases[f"mixed: windlass, {path}"] = Case(_windlass_step(arrays, mixed=True, path=path), _MIXED)
            cases[f"8-bit states: windlass, {path}"] = Case(
                _windlass_step(arrays, False, "8bit", path), 12 + 2 * _CODED
            )
    fused = torch.optim.AdamW([arrays.parameter], lr=1e-6, fused=True)
    cases["fp32: torch fused"] = Case(fused.step, _FP32)
    cases["mixed: torch fused and casts"] = Case(arrays.with_casts(fused.step), _MIXED)
    cases["fp32: torch foreach"] = Case(torch.optim.AdamW([arrays.parameter], lr=1e-6, foreach=True).step, _FP32)
    step, why = _deepspeed_step(arrays)
    if step is None:
        return cases, [f"DeepSpeedCPUAdam is not measured: {why}"]
    cases["fp32: DeepSpeedCPUAdam"] = Case(step, _FP32)
    cases["mixed: DeepSpeedCPUAdam and casts"] = Case(arrays.with_casts(step), _MIXED)
    return cases, []


def _windlass_step(
    arrays: Arrays, mixed: bool = False, state_dtype: str = "fp32", path: str | None = None
) -> Callable[[], object]:
    optimizer = CPUAdam([arrays.parameter], lr=1e-6, weight_decay=0.01, state_dtype=state_dtype)
    if mixed:
        optimizer.gradient_overrides = {arrays.parameter: arrays.half_gradient}
        optimizer.low_precision_copies = {arrays.parameter: arrays.half_parameter}

    def run() -> None:
        if path is not None:
            os.environ["WINDLASS_KERNELS"] = path
        optimizer.step()
        os.environ.pop("WINDLASS_KERNELS", None)

    return run if path is not None else optimizer.step


def _deepspeed_step(arrays: Arrays) -> tuple[Callable[[], object] | None, str]:
    if importlib.util.find_spec("deepspeed") is None:
        return None, "deepspeed is not installed"
    if reason := explain_build_lock():
        return None, reason
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        make: Any = DeepSpeedCPUAdam
        optimizer = make([arrays.parameter], lr=1e-6, weight_decay=0.01, adamw_mode=True)
        optimizer.step()
    except Exception as error:  # the first step compiles DeepSpeed's kernel, which may raise any error
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
    return optimizer.step, ""


def _time_interleaved(cases: dict[str, Case], rounds: int, calls: int) -> dict[str, list[float]]:
    """Return the median seconds of a step of each case in each round; every other round runs in reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds):
        for name in list(cases)[:: -1 if number % 2 else 1]:
            run = cases[name].run
            run()
            times = []
            for _ in range(calls):
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
            seconds[name].append(statistics.median(times))
    return seconds


def _result_table(cases: dict[str, Case], seconds: dict[str, list[float]], count: int) -> Table:
    rates = {name: cases[name].bytes_per_element * count / statistics.median(seconds[name]) / 1e9 for name in cases}
    table = Table("case", "ms", "spread", "bytes an element", "GB/s", "of the roof", box=None)
    for name in sorted(cases, key=lambda name: (name != _ROOF, name)):
        times = sorted(seconds[name])
        table.add_row(
            name,
            f"{statistics.median(times) * 1e3:.1f}",
            f"{times[0] * 1e3:.1f}-{times[-1] * 1e3:.1f}",
            f"{cases[name].bytes_per_element:.1f}",
            f"{rates[name]:.1f}",
            f"{rates[name] / rates[_ROOF]:.0%}",
        )
    return table


def _target_ratio(target: Target, seconds: dict[str, list[float]]) -> float:
    """Return the speed relative to the rival: the median over rounds of the ratio within a round."""
    pairs = zip(seconds[target.rival], seconds[target.case], strict=True)
    return statistics.median(rival / own for rival, own in pairs)


def _check_target(target: Target, seconds: dict[str, list[float]]) -> tuple[str, bool]:
    ratio = _target_ratio(target, seconds)
    good = ratio >= target.speed
    outcome = "kept" if good else "missed"
    return f"{target.case} is {ratio:.2f} x {target.rival}; target {target.speed:.2f}: {outcome}", good


if __name__ == "__main__":
    typer.run(main)
