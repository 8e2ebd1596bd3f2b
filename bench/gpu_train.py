"""One training step of a ~1B Llama in bf16 on one GPU: each stage of windlass, compared with plain PyTorch in one run.

    python bench/gpu_train.py                                     # on a CUDA device with about 60 GiB free
    python bench/gpu_train.py --device cpu --hidden 64 --layers 2 --vocabulary 256 --length 32 --batch 1

The second line is a functional test. Among the plain loops, `master` is the baseline, because its arithmetic equals
windlass's:

master    bf16 parameters compute; the optimizer (torch's fused AdamW) holds fp32 copies, gradients are cast to fp32
          before clipping, and the updated copies are cast back.
autocast  fp32 parameters under torch.autocast(bf16): as in most scripts; the casts cost time in the forward.
pure      bf16 parameters, gradients and moments: fewer bytes, but updates below bf16 precision are lost. A lower bound
          of time and memory.

On one rank nothing is sharded, so all stages do the same work; each is measured to show that none has needless
overhead. `master` compared with itself (`--engines master`) shows the noise.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rig.clock import free, roofs, run
from rig.one_gpu import PLAIN, STAGES, Shape, batches, build

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result

_RESULTS = Path(__file__).parent / "results"
_TARGET_RATIO = 1.03  # largest step time, as a multiple of that of `master`
_LOSS_TOLERANCE = 0.02  # allowed relative difference of losses; bf16 keeps 8 bits


@dataclass(frozen=True)
class EngineTrial:
    """Measurements of an engine and of `master`, which ran alternately."""

    engine: str
    parameters: int
    seconds: list[float]
    master_seconds: list[float]
    ratios: list[float]  # ratio of each round
    losses: list[float]
    master_losses: list[float]
    peak_bytes: int | None

    @property
    def ratio(self) -> float:
        """Median over rounds of the step time relative to `master`'s."""
        return statistics.median(self.ratios)

    @property
    def max_loss_difference(self) -> float:
        """Largest relative difference of two losses of one step; infinite if a loss is NaN."""
        apart = [abs(a - b) / abs(b) for a, b in zip(self.losses, self.master_losses, strict=True)]
        return math.inf if any(map(math.isnan, apart)) else max(apart)


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu for a functional test.")] = "cuda",
    engines: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join((*STAGES, *PLAIN[1:])),
    hidden: Annotated[int, typer.Option(help="Width, a multiple of 64.")] = 2048,
    layers: Annotated[int, typer.Option(help="Blocks.")] = 16,
    vocabulary: Annotated[int, typer.Option(help="Tokens.")] = 32000,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 2048,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each engine.")] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per round.")] = 5,
    name: Annotated[str, typer.Option(help="Name of the file in --results.")] = "gpu_train",
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = _RESULTS,
) -> None:
    """Measure each engine against `master` alternately, print a table, write the JSON; exit code 1 if losses differ."""
    place = _select_device(device)
    shape, console = Shape(hidden, layers, vocabulary, length, batch), bench_console()
    best = roofs(place)
    trials = []
    for engine in engines.split(","):
        console.print(f"{engine} and master alternately, {rounds} rounds of {steps} steps", style="dim")
        trials.append(_run_trial(engine.strip(), shape, rounds, steps, place))
    console.print(_describe_loss_equality(trials), soft_wrap=True)
    console.print(_result_table(trials, shape, best, place))
    path = write_result(results / f"{name}.json", _result_to_json(trials, shape, best, place))
    console.print(f"written: {path}", soft_wrap=True)
    if any(t.max_loss_difference > _LOSS_TOLERANCE for t in trials):
        raise typer.Exit(1)


def _select_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device; --device cpu with small sizes is a functional test")
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def _run_trial(engine: str, shape: Shape, rounds: int, steps: int, device: torch.device) -> EngineTrial:
    """Measure `engine` and `master` alternately; they are built before and freed afterwards, so that at most two models
    exist."""
    peak = _measure_peak_bytes(engine, shape, device)
    contenders = {"ours": build(engine, shape, device), "master": build("master", shape, device)}
    parameters = contenders["ours"].parameters
    tokens = {name: batches(shape, device) for name in contenders}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, list[float]] = {name: [] for name in contenders}
    ratios = []
    for number in range(rounds + 1):
        of_round = {}
        for name in contenders if number % 2 else reversed(contenders):
            times, result = run(contenders[name].step, tokens[name], steps + 1, device)
            of_round[name] = times[1:]
            losses[name] += result
        if number:  # the first round warms up: allocator, autotuning, clocks
            ratios.append(statistics.median(of_round["ours"]) / statistics.median(of_round["master"]))
            for name, times in of_round.items():
                seconds[name] += times
    for item in contenders.values():
        item.end()
    contenders.clear()
    del item
    free(device)
    return EngineTrial(
        engine, parameters, seconds["ours"], seconds["master"], ratios, losses["ours"], losses["master"], peak
    )


def _measure_peak_bytes(engine: str, shape: Shape, device: torch.device) -> int | None:
    """Return the peak device bytes of construction and two steps, with no other model in memory; None on a CPU."""
    if device.type != "cuda":
        return None
    free(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    contender = build(engine, shape, device)
    run(contender.step, batches(shape, device), 2, device)
    peak = torch.cuda.max_memory_allocated(device) - before
    contender.end()
    del contender
    free(device)
    return peak


def _describe_loss_equality(trials: list[EngineTrial]) -> str:
    unequal = [t.engine for t in trials if t.max_loss_difference > _LOSS_TOLERANCE]
    outcome = f"NOT equal ({', '.join(unequal)})" if unequal else "equal"
    furthest = max(trials, key=lambda t: t.max_loss_difference)
    return (
        f"losses: {outcome} within {_LOSS_TOLERANCE:.0%} of master's over {len(trials[0].losses)} steps; the furthest "
        "is "
        f"{furthest.engine} with {furthest.max_loss_difference:.2%}"
    )


def _flops_per_step(parameters: int, shape: Shape) -> float:
    """Return the FLOPs of a step: for each token 6 per parameter (without the embedding) and 6 x length x hidden per
    layer."""
    products = parameters - shape.vocabulary * shape.hidden
    tokens = shape.batch * shape.length
    return 6.0 * tokens * (products + shape.layers * shape.length * shape.hidden)


def _result_table(trials: list[EngineTrial], shape: Shape, best: dict[str, float], device: torch.device) -> Table:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    table = Table(
        title=f"{trials[0].parameters / 1e9:.3f}B Llama, bf16, {shape.batch} x {shape.length} tokens, {where}; "
        f"roofs: {best['matmul'] / 1e12:.0f} TFLOP/s, {best['copy'] / 1e9:.0f} GB/s",
        title_justify="left",
    )
    for column in ("engine", "ms", "master ms", "x master", "spread", "target", "", "of roof", "peak GiB"):
        table.add_column(column, justify="left" if column == "engine" else "right", no_wrap=True)
    for trial in trials:
        median = statistics.median(trial.seconds)
        ours = trial.engine in STAGES
        table.add_row(
            trial.engine,
            f"{median * 1e3:.1f}",
            f"{statistics.median(trial.master_seconds) * 1e3:.1f}",
            f"{trial.ratio:.3f}",
            f"{min(trial.ratios):.3f}-{max(trial.ratios):.3f}",
            f"<= {_TARGET_RATIO}" if ours else "",
            ("yes" if trial.ratio <= _TARGET_RATIO else "NO") if ours else "",
            f"{_flops_per_step(trial.parameters, shape) / median / best['matmul']:.0%}",
            f"{trial.peak_bytes / 2**30:.1f}" if trial.peak_bytes is not None else "",
        )
    return table


def _result_to_json(
    trials: list[EngineTrial], shape: Shape, best: dict[str, float], device: torch.device
) -> dict[str, Any]:
    return {
        "bench": "gpu_train",
        "device": str(device),
        "shape": asdict(shape),
        "roofs": best,
        "flops_of_a_step": _flops_per_step(trials[0].parameters, shape),
        "target": _TARGET_RATIO,
        "trials": [{**asdict(t), "ratio": t.ratio, "loss_apart": t.max_loss_difference} for t in trials],
    }


if __name__ == "__main__":
    typer.run(main)
