"""All matrix products with weights in one forward on the CPU: windlass's packed weights, F.linear and oneDNN, compared
with the roofline.

python bench/cpu_gemm.py                     # the 143.7M Llama of the serving benchmark: a minute, 3 GB
python bench/cpu_gemm.py --rows 1,8 --formats fp32 --rounds 3 --path AVX2

The roofline is measured in the same run: memory by a plain read loop on all threads, arithmetic by MKL's 2048^3
product.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch.nn import functional as F

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.kernels.huge_pages import empty_on_huge_pages
from windlass.kernels.inference_path import get_inference_path, list_inference_paths
from windlass.kernels.packed_gemm import pack_weight, packed_linear

_RESULTS = Path(__file__).parent / "results"
# Features (out, in) of the matrices of a layer (query, key and value joined; gate and up joined), number of layers, and
# features of the head.
_LAYER, _LAYERS, _HEAD = ((1536, 1024), (1024, 1024), (5632, 1024), (1024, 2816)), 12, (8192, 1024)
_ROOF_BYTES, _ROOF_SIDE = 600 << 20, 2048
_READ, _GEMM = "read loop", "MKL 2048^3"


@dataclass(frozen=True)
class Contender:
    """One implementation of the products, for one number of input rows.

    Attributes:
        run: computes all products once.
        nbytes: bytes of the weights.
    """

    run: Callable[[], object]
    rows: int
    nbytes: int


@dataclass(frozen=True)
class Goal:
    """Goal: `value` is at least (or at most) `limit`."""

    text: str
    value: float
    limit: float
    at_most: bool = False

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def main(
    rows: Annotated[str, typer.Option(help="Numbers of rows, with commas.")] = "1,2,4,8,16,32,512",
    formats: Annotated[str, typer.Option(help="Weight formats, with commas; coded: int8 inputs too.")] = (
        "fp32,bf16,int8,coded"
    ),
    rounds: Annotated[int, typer.Option(min=2, help="Turns that each contender takes.")] = 5,
    threads: Annotated[int, typer.Option(min=0, help="0: torch's number.")] = 0,
    path: Annotated[str, typer.Option(help="Instruction set; by default the best.")] = "",
    results: Annotated[Path, typer.Option(help="Folder of the JSON file.")] = _RESULTS,
    name: Annotated[str, typer.Option(help="Name of the JSON file.")] = "cpu_gemm",
) -> None:
    """Measure all contenders alternately."""
    if threads:
        torch.set_num_threads(threads)
    chosen = get_inference_path(path or None)
    if chosen.module is None:
        raise typer.BadParameter(
            f"{chosen.name} is not a native path; use one of {', '.join(list_inference_paths()[:-1])}"
        )
    console = bench_console()
    counts = [int(count) for count in rows.split(",")]
    console.print(f"{chosen.name}, torch {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads")
    contenders: dict[str, Contender] = {}
    with torch.no_grad():
        for format in formats.split(","):
            contenders |= _own_contenders(format, counts, chosen.name)
        contenders |= _torch_contenders(counts)
        memory = empty_on_huge_pages((_ROOF_BYTES,), torch.uint8).fill_(1)
        square = torch.randn(_ROOF_SIDE, _ROOF_SIDE)
        module = chosen.module
        runs: dict[str, Callable[[], object]] = {
            _READ: lambda: module.read_memory(chosen.number, memory.data_ptr(), _ROOF_BYTES, torch.get_num_threads()),
            _GEMM: lambda: square @ square,
            **{key: contender.run for key, contender in contenders.items()},
        }
        before = _cpu_seconds(), time.perf_counter()
        seconds = _time_interleaved(runs, rounds)
        others = _other_cores(*before)
    read = _ROOF_BYTES / statistics.median(seconds[_READ]) / 1e9
    flops = 2 * _ROOF_SIDE**3 / statistics.median(seconds[_GEMM]) / 1e9
    console.print(f"roofs: read {read:.1f} GB/s, {_GEMM} {flops:.0f} GFLOP/s; other processes: {others:.2f} cores")
    console.print(_table(contenders, seconds, read, flops))
    for goal in _goals(contenders, seconds):
        console.print(f"{goal.text}: {goal.value:.2f}; goal {goal.limit}: {'kept' if goal.is_met else 'missed'}")
    write_result(
        results / f"{name}.json",
        {"path": chosen.name, "read_gb_per_s": read, "gemm_gflops": flops, "other_cores": others, "seconds": seconds},
    )


def _shapes() -> list[tuple[int, int]]:
    return [*_LAYER * _LAYERS, _HEAD]


def _own_contenders(format: str, counts: list[int], path: str) -> dict[str, Contender]:
    coded = format == "coded"
    name = "int8" if coded else format
    weights = [pack_weight(torch.randn(shape), name, quantize_inputs=coded, path=path) for shape in _shapes()]
    nbytes = sum(weight.nbytes for weight in weights)
    dtypes = (torch.float32, torch.bfloat16) if format == "bf16" else (torch.float32,)
    results = {}
    for dtype in dtypes:
        label = f"windlass {name}" + (", bf16 inputs" if dtype == torch.bfloat16 else ", int8 inputs" if coded else "")
        for count in counts:
            x = _inputs(count, dtype)
            results[f"{label} x {count}"] = Contender(
                lambda x=x: [packed_linear(x[weight.in_features], weight) for weight in weights],  # type: ignore[misc]
                count,
                nbytes,
            )
    return results


def _torch_contenders(counts: list[int]) -> dict[str, Contender]:
    weights = [torch.randn(shape) for shape in _shapes()]
    nbytes = sum(weight.nbytes for weight in weights)
    results = {}
    for count in counts:
        x = _inputs(count, torch.float32)
        results[f"F.linear fp32 x {count}"] = Contender(
            lambda x=x: [F.linear(x[weight.shape[1]], weight) for weight in weights],  # type: ignore[misc]
            count,
            nbytes,
        )
    if not torch.backends.mkldnn.is_available():
        return results
    for dtype in (torch.float32, torch.bfloat16):
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype)) for weight in weights]
        for count in counts:
            x = _inputs(count, dtype)
            results[f"oneDNN {str(dtype).removeprefix('torch.')} x {count}"] = Contender(
                lambda x=x, packed=packed: [  # type: ignore[misc]
                    torch.ops.mkldnn._linear_pointwise(x[shape[1]], weight, None, "none", [], "")
                    for weight, shape in zip(packed, _shapes(), strict=True)
                ],
                count,
                nbytes * dtype.itemsize // 4,
            )
    return results


def _inputs(count: int, dtype: torch.dtype) -> dict[int, torch.Tensor]:
    return {features: torch.randn(count, features).to(dtype) for features in {shape[1] for shape in _shapes()}}


def _time_interleaved(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each run in each round but the first; every other round runs in reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            start = time.perf_counter()
            runs[name]()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _cpu_seconds() -> float:
    """Return the CPU seconds of all processes except this one since the machine started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:2])


def _other_cores(seconds: float, since: float) -> float:
    """Return the mean number of cores that other processes have used since `since`, an earlier `_cpu_seconds`."""
    return max(0.0, (_cpu_seconds() - seconds) / (time.perf_counter() - since))


def _table(contenders: dict[str, Contender], seconds: dict[str, list[float]], read: float, flops: float) -> Table:
    table = Table("product", "ms", "spread", "GB/s", "of read", "GFLOP/s", "of MKL", box=None)
    parameters = sum(outputs * features for outputs, features in _shapes())
    for name, contender in contenders.items():
        times = sorted(seconds[name])
        median = statistics.median(times)
        rate, speed = contender.nbytes / median / 1e9, 2 * parameters * contender.rows / median / 1e9
        table.add_row(
            name,
            f"{median * 1e3:.2f}",
            f"{times[0] * 1e3:.2f}-{times[-1] * 1e3:.2f}",
            f"{rate:.1f}",
            f"{rate / read:.0%}",
            f"{speed:.0f}",
            f"{speed / flops:.0%}",
        )
    return table


def _goals(contenders: dict[str, Contender], seconds: dict[str, list[float]]) -> list[Goal]:
    """Return the goals. Ratios are medians over rounds of the ratio within a round."""

    def ratio(name: str, other: str, factor: float = 1.0) -> float:
        return factor * statistics.median(a / b for a, b in zip(seconds[name], seconds[other], strict=True))

    results = []
    item, eight, large = "windlass fp32 x 1", "windlass fp32 x 8", "windlass fp32 x 512"
    if item in contenders:
        results.append(Goal("1 row, of the read rate", ratio(_READ, item, contenders[item].nbytes / _ROOF_BYTES), 0.9))
        if eight in contenders:
            results.append(Goal("8 rows, times 1 row", ratio(eight, item), 1.25, at_most=True))
        if "windlass bf16 x 1" in contenders:
            results.append(Goal("1 row, bf16 over fp32", ratio(item, "windlass bf16 x 1"), 1.8))
        if "windlass int8, int8 inputs x 1" in contenders:
            results.append(Goal("1 row, int8 over fp32", ratio(item, "windlass int8, int8 inputs x 1"), 3.2))
    if large in contenders:
        parameters = sum(outputs * features for outputs, features in _shapes())
        work = 512 * parameters / _ROOF_SIDE**3
        results.append(Goal("512 rows, of MKL's 2048^3", ratio(_GEMM, large, work), 0.85))
        if "windlass bf16, bf16 inputs x 512" in contenders:
            results.append(Goal("512 rows, bf16 over fp32", ratio(large, "windlass bf16, bf16 inputs x 512"), 1.7))
    return results


if __name__ == "__main__":
    typer.run(main)
