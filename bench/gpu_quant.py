"""One linear layer in packed formats on one GPU at 1, 16, 512 and 4096 rows, compared with bf16 in one run.

    python bench/gpu_quant.py                                     # needs a CUDA device and Triton; about 3 GiB
    python bench/gpu_quant.py --device cpu --outputs 96 --features 64 --rows 1,3 --cold 0

The second line is a functional test: its times mean nothing, because the kernels run only on a GPU.

bf16          torch's `F.linear`, the baseline.
FORMAT        the layer in the format, by the Triton kernel: bf16 inputs, not rounded.
FORMAT, torch the same without the kernel: rows are unpacked and multiplied by torch.
_scaled_mm    torch's product of float8 by float8 (compute capability 8.9 and above). Unlike the layer, it rounds inputs
              to float8: the time includes this rounding, and the error is larger.

Weights are cold: each product of a turn uses another copy, and the copies together are larger than the device's cache.
All products of a turn are one CUDA graph, so that no launch from Python is measured. The roof of a product is the
larger of two times: its bytes at the rate of a copy, and its FLOPs at the rate of a bf16 product, both measured in the
same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated
from unittest import mock

import torch
import typer
from rich.table import Table
from rig.clock import free, roofs, run
from torch.nn import functional as F

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.kernels.device_matmul import has_kernel
from windlass.kernels.packed_linear import PackedLinear
from windlass.kernels.weight_format import PackedWeight, get_weight_format

_RESULTS = Path(__file__).parent / "results"
_FORMATS = "int8,int8_g128,int4_g128,int4_g128_zp,int2_g128,fp8"

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """Products of one computation: one for each copy of the weight."""

    name: str
    products: list[Product]
    weight_bytes: int
    weight: torch.Tensor  # values of the weight in float32


@dataclass(frozen=True)
class Trial:
    """Measurements of a contender at a number of rows.

    Attributes:
        seconds: time of a product in each turn.
        roof: lower bound of the time of a product, by its bytes and its FLOPs.
        error: norm of the difference from the product in float64, relative to that product.
    """

    name: str
    rows: int
    seconds: list[float]
    roof: float
    error: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu for a functional test.")] = "cuda",
    formats: Annotated[str, typer.Option(help="Weight formats, with commas.")] = _FORMATS,
    outputs: Annotated[int, typer.Option(help="Output features, a multiple of 16.")] = 11008,
    features: Annotated[int, typer.Option(help="Input features, a multiple of 16.")] = 4096,
    rows: Annotated[str, typer.Option(help="Numbers of rows, with commas.")] = "1,16,512,4096",
    cold: Annotated[int, typer.Option(help="MiB of copies of each weight: several times the cache.")] = 256,
    turns: Annotated[int, typer.Option(min=1, help="Turns that each contender takes.")] = 15,
    name: Annotated[str, typer.Option(help="Name of the file in --results.")] = "gpu_quant",
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = _RESULTS,
) -> None:
    """Measure all contenders in turn at each number of rows, print a table, and write the JSON."""
    place, counts, console = _select_device(device), [int(one) for one in rows.split(",")], bench_console()
    best = roofs(place)
    torch.manual_seed(0)
    weight = torch.randn(outputs, features, device=place) / features**0.5
    contenders = _build(weight, formats.split(","), cold << 20)
    trials: list[Trial] = []
    for count in counts:
        console.print(f"{count} rows: {len(contenders)} contenders in turn, {turns} turns", style="dim")
        trials += _measure(contenders, count, turns, best)
    where = torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU, a functional test"
    console.print(_table(trials, counts, f"{outputs} x {features}, {where}; {_describe_roofs(best)}"))
    console.print("microseconds of a product; times bf16; of the roof; error relative to the contender's own weight")
    content = {
        "bench": "gpu_quant",
        "device": where,
        "outputs": outputs,
        "features": features,
        "roofs": best,
        "trials": [{**asdict(trial), "median": trial.median} for trial in trials],
    }
    console.print(f"written: {write_result(results / f'{name}.json', content)}", soft_wrap=True)


def _select_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(
            "this measures kernels of a GPU, and there is no CUDA device; --device cpu with small sizes is a "
            "functional test"
        )
    device = torch.device(name, 0) if name == "cuda" else torch.device(name)
    if device.type == "cuda" and not has_kernel(torch.zeros(1, 16, device=device, dtype=torch.bfloat16)):
        raise typer.BadParameter(
            "the kernels need Triton and a GPU that multiplies bfloat16 (compute capability 8.0); install triton"
        )
    return device


def _build(weight: torch.Tensor, formats: list[str], cold: int) -> list[Contender]:
    contenders = [_plain(weight.bfloat16(), cold)]
    for name in formats:
        form = get_weight_format(name)
        packed = form.pack(weight)
        nbytes = sum(tensor.nbytes for tensor in packed.values())
        copies = [{key: tensor.clone() for key, tensor in packed.items()} for _ in range(_count(cold, nbytes))]
        layers = [_layer(name, one) for one in copies]
        unpacked = form.unpack(packed).float()
        contenders.append(Contender(name, list(layers), nbytes, unpacked))
        contenders.append(Contender(f"{name}, torch", [partial(_by_torch, one) for one in layers], nbytes, unpacked))
        if name == "fp8" and weight.is_cuda and torch.cuda.get_device_capability(weight.device) >= (8, 9):
            products: list[Product] = [partial(_scaled_product, one) for one in copies]
            contenders.append(Contender("_scaled_mm", products, nbytes, unpacked))
    return contenders


def _count(cold: int, nbytes: int) -> int:
    return max(1, -(-cold // nbytes))


def _plain(weight: torch.Tensor, cold: int) -> Contender:
    copies = [weight.clone() for _ in range(_count(cold, weight.nbytes))]
    return Contender("bf16", [partial(F.linear, weight=one) for one in copies], weight.nbytes, weight.float())


def _layer(name: str, packed: PackedWeight) -> PackedLinear:
    codes = packed.get("weight_packed", packed.get("weight"))
    assert codes is not None
    outputs, features = packed["weight_shape"].tolist() if "weight_shape" in packed else codes.shape
    layer = PackedLinear(features, outputs, False, weight_format=name, device=codes.device)
    layer.set_packed(packed)
    return layer


def _by_torch(layer: PackedLinear, input: torch.Tensor) -> torch.Tensor:
    """Return the product of a layer without the kernel: torch unpacks the rows and multiplies."""
    with mock.patch("windlass.kernels.device_matmul.runs_kernels", lambda device: False):
        output: torch.Tensor = layer(input)
    return output


def _scaled_product(packed: PackedWeight, input: torch.Tensor) -> torch.Tensor:
    """Return torch's product of float8, with a scale for each row of the input and each output."""
    scale = input.abs().amax(1, keepdim=True).float().clamp_(min=1e-12) / 448
    rounded = (input / scale).to(torch.float8_e4m3fn)
    product: torch.Tensor = torch._scaled_mm(
        rounded, packed["weight"].t(), scale, packed["weight_scale"].t(), out_dtype=torch.bfloat16
    )
    return product


@torch.inference_mode()
def _measure(contenders: list[Contender], rows: int, turns: int, best: dict[str, float]) -> list[Trial]:
    device, features = contenders[0].weight.device, contenders[0].weight.shape[1]
    input = torch.randn(rows, features, device=device).bfloat16()
    errors = [_error(one, input) for one in contenders]
    works = [_record(one.products, input) for one in contenders]
    seconds: list[list[float]] = [[] for _ in contenders]
    for number in range(turns + 1):
        order = range(len(contenders)) if number % 2 else reversed(range(len(contenders)))
        for place in order:
            times, _ = run(partial(_step, works[place]), iter([input, input]), 2, device)
            if number:  # the first turn warms up
                seconds[place].append(times[1] / len(contenders[place].products))
    works.clear()
    free(device)
    trials = []
    for one, error, times in zip(contenders, errors, seconds, strict=True):
        outputs = one.weight.shape[0]
        moved = one.weight_bytes + 2 * rows * (features + outputs)
        roof = max(moved / best["copy"], 2 * rows * features * outputs / best["matmul"])
        trials.append(Trial(one.name, rows, times, roof, error))
    return trials


def _step(work: Callable[[], None], tokens: torch.Tensor) -> torch.Tensor:
    work()
    return torch.zeros(())


def _record(products: list[Product], input: torch.Tensor) -> Callable[[], None]:
    """Return a function that computes all products: on a GPU as one graph."""

    def work() -> None:
        for product in products:
            product(input)

    if not input.is_cuda:
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _error(contender: Contender, input: torch.Tensor) -> float:
    exact = input[:16].double() @ contender.weight.double().T
    found = contender.products[0](input)[:16].double()
    return float((found - exact).norm() / exact.norm())


def _describe_roofs(best: dict[str, float]) -> str:
    return f"roofs: {best['copy'] / 1e9:.0f} GB/s, {best['matmul'] / 1e12:.0f} TFLOP/s in bf16"


def _table(trials: list[Trial], counts: list[int], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("contender")
    for count in counts:
        table.add_column(f"{count} rows", justify="right", no_wrap=True)
    table.add_column("error", justify="right")
    plain = {trial.rows: trial.median for trial in trials if trial.name == "bf16"}
    for name in dict.fromkeys(trial.name for trial in trials):
        own = {trial.rows: trial for trial in trials if trial.name == name}
        cells = [
            f"{one.median * 1e6:.1f}  {plain[count] / one.median:.2f}x  {one.roof / one.median:.0%}"
            for count, one in own.items()
        ]
        table.add_row(name, *cells, f"{max(one.error for one in own.values()):.1e}")
    return table


if __name__ == "__main__":
    typer.run(main)
