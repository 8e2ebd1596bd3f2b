"""Loss increase and time savings of delayed updates (`offload_optimizer.delayed_update`) over undelayed updates.

python bench/delayed_update_cost.py                                # the demo's model, 900 steps, 2 seeds: half an hour
python bench/delayed_update_cost.py --steps 40 --seeds 1 --rounds 1 --hidden 128
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_launch import run_task
from windlass.cli.benches.bench_results import write_result
from windlass.cli.benches.training_bench import BenchSizes, plain_config
from windlass.cli.training.default_recipe import default_config
from windlass.cli.training.loss_plot import smooth
from windlass.cli.training.run_metrics import read_rows

_RESULTS = Path(__file__).parent / "results"
# An emulated device makes host memory a separate tier; without it, undelayed updates would use another kernel.
_EMULATED_DEVICE_ENV = {"WINDLASS_EMULATE_DEVICE": "64G"}
_COLORS = ("#888888", "#d1495b", "#1f4e79")
IMMEDIATE = "at once"


@dataclass(frozen=True)
class LossCurve:
    """Losses of one run: nats per token of each step, and held-out bits per byte by step."""

    losses: list[float]
    held_out: dict[int, float]

    @property
    def final_held_out(self) -> float:
        """Held-out bits per byte at the end."""
        return self.held_out[max(self.held_out)]

    @property
    def final_training_loss(self) -> float:
        """Mean training loss of the last tenth of the steps."""
        return statistics.mean(self.losses[-max(1, len(self.losses) // 10) :])


def main(
    steps: Annotated[int, typer.Option(min=2, help="Steps of each run on text.")] = 900,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each mode; the noise is their spread.")] = 2,
    start: Annotated[int, typer.Option(min=1, help="Undelayed steps before the later start; the paper's 40.")] = 40,
    nproc: Annotated[int, typer.Option(help="Ranks of a run on text.")] = 2,
    hidden: Annotated[int, typer.Option(min=64, help="Width of the model that is timed, a multiple of 64.")] = 512,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of this model.")] = 6,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of 128 tokens in a batch of this model.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each mode.")] = 5,
    name: Annotated[str, typer.Option(help="Name of the files in --results.")] = "delayed_update",
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the picture.")] = _RESULTS,
) -> None:
    """Train the demo's model on text in each mode, then time one rank with a spare core. Write all results."""
    ways: dict[str, dict[str, Any]] = {
        IMMEDIATE: {},
        "delayed": {"delayed_update": True},
        f"delayed from step {start}": {"delayed_update": True, "delayed_update_start": start},
    }
    console = bench_console()
    curves = {
        way: [_train_on_text(section, steps, seed, nproc, console, way) for seed in range(seeds)]
        for way, section in ways.items()
    }
    sizes = BenchSizes(hidden, layers, 128, batch, rounds, steps=5)
    timed = _time_steps({way: section for way, section in ways.items() if "delayed_update_start" not in section}, sizes)
    console.print(_loss_table(curves, steps, nproc))
    console.print(_time_table(timed, sizes))
    verdicts = _conclusions(curves, timed)
    for line in verdicts:
        console.print(line, soft_wrap=True)
    found = {
        "bench": "delayed_update",
        "steps": steps,
        "ranks": nproc,
        "curves": {way: [vars(curve) for curve in runs] for way, runs in curves.items()},
        "timed": timed,
        "timed_sizes": vars(sizes),
        "verdicts": verdicts,
    }
    written = write_result(results / f"{name}.json", found)
    drawn = _plot(curves, timed, results / f"{name}.png")
    console.print(f"written: {written}{' and its .png' if drawn else ''}", soft_wrap=True)


def _make_config(section: dict[str, Any]) -> dict[str, Any]:
    config = default_config()
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", **section}
    return config


def _train_on_text(
    section: dict[str, Any], steps: int, seed: int, nproc: int, console: Console, update_mode: str
) -> LossCurve:
    """Run `windlass train` on the text of the standard library."""
    console.print(f"training: {update_mode}, seed {seed}, {steps} steps", style="dim")
    with TemporaryDirectory(prefix="windlass-delayed-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_make_config(section)))
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "windlass", "train", "--config", f"{folder}/config.json", "--model", "tiny"]
        command += ["--data", "stdlib", "--nproc", str(nproc), "--steps", str(steps), "--seed", str(seed)]
        command += ["--sample-tokens", "0", "--out", str(out)]
        done = subprocess.run(
            command, env={**os.environ, **_EMULATED_DEVICE_ENV}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        rows = read_rows(out / "metrics.csv")
    return LossCurve(
        [row.loss for row in rows if row.loss is not None],
        {row.step: row.held_out_bits_per_byte for row in rows if row.held_out_bits_per_byte is not None},
    )


def _time_steps(ways: dict[str, dict[str, Any]], sizes: BenchSizes) -> dict[str, dict[str, Any]]:
    """Measure step times alternately on one rank with one thread, so that the update has a core of its own."""
    configs = {}
    for way, section in ways.items():
        configs[way] = plain_config(sizes, stage=2)
        configs[way]["zero_optimization"]["offload_optimizer"] = {"device": "cpu", **section}
    (rank,) = run_task(sizes.make_task(configs), 1, {**_EMULATED_DEVICE_ENV, "OMP_NUM_THREADS": "1"})
    return {
        way: {
            "seconds": rank["seconds"][way],
            "update_seconds": (rank["delayed_update"][way] or {}).get("seconds"),  # seconds of the last update
            "parameters": rank["parameters"],
        }
        for way in ways
    }


def _loss_table(curves: dict[str, list[LossCurve]], steps: int, nproc: int) -> Table:
    table = Table(title=f"tiny on stdlib, {steps} steps, {nproc} ranks, AdamW in host memory", title_justify="left")
    for column in ("updates", "held-out bits/byte", "each seed", "last tenth, nats/token"):
        table.add_column(column, justify="left" if column == "updates" else "right")
    for way, runs in curves.items():
        each = ", ".join(f"{curve.final_held_out:.4f}" for curve in runs)
        last, tail = (
            statistics.mean(getattr(c, what) for c in runs) for what in ("final_held_out", "final_training_loss")
        )
        table.add_row(way, f"{last:.4f}", each, f"{tail:.4f}")
    return table


def _time_table(timed: dict[str, dict[str, Any]], sizes: BenchSizes) -> Table:
    millions = next(iter(timed.values()))["parameters"] / 1e6
    title = (
        f"{millions:.1f}M parameters, {sizes.batch} x {sizes.length} tokens, one rank and its updates, a thread each"
    )
    table = Table(title=title, title_justify="left")
    for column in ("updates", "ms/step", "spread", "an update ms"):
        table.add_column(column, justify="left" if column == "updates" else "right")
    for way, row in timed.items():
        times, update = row["seconds"], row["update_seconds"]
        table.add_row(
            way,
            f"{statistics.median(times) * 1e3:.1f}",
            f"{min(times) * 1e3:.0f}-{max(times) * 1e3:.0f}",
            f"{update * 1e3:.1f}" if update else "-",
        )
    return table


def _conclusions(curves: dict[str, list[LossCurve]], timed: dict[str, dict[str, Any]]) -> list[str]:
    base = curves[IMMEDIATE]
    noise = max(curve.final_held_out for curve in base) - min(curve.final_held_out for curve in base)
    text = []
    for way, runs in curves.items():
        if way != IMMEDIATE:
            apart = [late.final_held_out - once.final_held_out for late, once in zip(runs, base, strict=True)]
            text.append(
                f"{way}: held-out bits/byte {statistics.mean(apart):+.4f} against undelayed (by seed "
                f"{', '.join(f'{item:+.4f}' for item in apart)}; undelayed seeds differ by {noise:.4f})"
            )
    once, late = (statistics.median(timed[way]["seconds"]) * 1e3 for way in (IMMEDIATE, "delayed"))
    update = timed["delayed"]["update_seconds"] * 1e3
    text.append(f"time: {once:.1f} ms a step undelayed, {late:.1f} delayed; an update takes {update:.1f}")
    return text


def _plot(curves: dict[str, list[LossCurve]], timed: dict[str, dict[str, Any]], path: Path) -> bool:
    """Write a PNG. Return False if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(12, 4.2), dpi=140, layout="constrained")
    full, end, bars = figure.subplots(1, 3, width_ratios=(2, 2, 1))
    for (way, runs), color in zip(curves.items(), _COLORS, strict=True):
        mean = smooth([statistics.mean(step) for step in zip(*(run.losses for run in runs), strict=True)])
        places = range(1, len(mean) + 1)
        full.plot(places, mean, color=color, linewidth=1.4, label=way)
        tail = len(mean) // 2
        end.plot(places[tail:], mean[tail:], color=color, linewidth=1.4, label=way)
    full.set(title="training loss, smoothed, mean of seeds", xlabel="step", ylabel="nats a token")
    end.set(title="its second half", xlabel="step")
    full.legend(frameon=False)
    times = {way: statistics.median(row["seconds"]) * 1e3 for way, row in timed.items()}
    bars.bar_label(bars.bar(list(times), list(times.values()), color=_COLORS[: len(times)]), fmt="%.0f")
    bars.set(title="a step", ylabel="ms")
    for axes in (full, end, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("delayed and undelayed updates")
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))
    return True


if __name__ == "__main__":
    typer.run(main)
