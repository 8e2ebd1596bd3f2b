"""Held-out loss of the demo's model trained with compressed optimizers, compared with AdamW after equal tokens.

python bench/compressed_training.py --pieces 100    (repeat until it prints the table)
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.table import Table
from rig.chosen_names import choose_names

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import run_facts, write_result
from windlass.cli.training.default_recipe import default_config
from windlass.cli.training.run_metrics import read_rows

_RESULTS = Path(__file__).parent / "results"
SEQUENCES = 8
"""Sequences of one step on all ranks together."""
BASE = "AdamW"


@dataclass(frozen=True)
class Method:
    """Optimizer and number of data-parallel ranks.

    Attributes:
        phases: options of the optimizer that are given as fractions of all steps.
        goal: largest relative excess of the held-out loss over AdamW's; None: no goal.
    """

    optimizer: str
    stage: int
    ranks: int = 2
    params: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    goal: float | None = None

    def config(self, steps: int) -> dict[str, Any]:
        """Return the configuration of a run."""
        config = default_config()
        config["train_micro_batch_size_per_gpu"] = SEQUENCES // self.ranks
        config["zero_optimization"] = {"stage": self.stage}
        phases = {key: max(1, round(part * steps)) for key, part in self.phases.items()}
        config["optimizer"]["type"] = self.optimizer
        config["optimizer"]["params"] |= {**self.params, **phases}
        return config


_AVERAGED = {"outer_lr": 1.0, "outer_momentum": 0.0}
"""Outer optimizer that sets the parameters to the mean of the replicas."""
_FASTER = {"outer_lr": 1.0, "outer_momentum": 0.5}
"""Outer optimizer with momentum, because a replica has only a part of a step's sequences, and Adam moves less when
gradients are noisier."""
_BOUNDED = {"max_update": 1.0}
_ZERO_ONE = {"local_step_clipper": 2}
_AFTER_ADAMW = {"start_step": 0.3}
METHODS = {
    BASE: Method("AdamW", 0),
    "1-bit Adam": Method("OneBitAdam", 0, params=_BOUNDED, phases={"freeze_step": 0.3}, goal=0.01),
    "1-bit Adam, stage 1": Method("OneBitAdam", 1, params=_BOUNDED, phases={"freeze_step": 0.3}, goal=0.01),
    "1-bit Adam, unbounded steps": Method("OneBitAdam", 0, phases={"freeze_step": 0.3}),
    "0/1 Adam": Method(
        "ZeroOneAdam",
        0,
        params=_ZERO_ONE | _BOUNDED,
        phases={"var_update_scaler": 0.3, "var_freeze_step": 0.3, "local_step_scaler": 0.1},
        goal=0.01,
    ),
    "DiLoCo, 2 replicas": Method("DiLoCo", 0, params={"inner_steps": 32, **_FASTER}, phases=_AFTER_ADAMW, goal=0.03),
    "DiLoCo, 4 replicas": Method(
        "DiLoCo",
        0,
        ranks=4,
        params={"inner_steps": 16, "outer_lr": 1.0, "outer_momentum": 0.6},
        phases={"start_step": 0.6},
        goal=0.03,
    ),  # fmt: skip
    "DiLoCo, 2 replicas, local from the start": Method("DiLoCo", 0, params={"inner_steps": 32, **_AVERAGED}),
    "DiLoCo, 2 replicas, local from the start, outer momentum 0.9": Method("DiLoCo", 0, params={"inner_steps": 32}),
}


@dataclass(frozen=True)
class Run:
    """Training of one method with one seed.

    Attributes:
        held_out: bits per byte by step.
        commit: commit of windlass that was measured.
    """

    method: str
    seed: int
    held_out: dict[str, float]
    commit: str | None = None

    @property
    def last(self) -> float:
        """Bits per byte at the end."""
        return self.held_out[max(self.held_out, key=int)]


def main(
    only: Annotated[str, typer.Option(help=f"Separated by semicolons: {'; '.join(METHODS)}.")] = ";".join(METHODS),
    steps: Annotated[int, typer.Option(min=8, help="Steps of each run.")] = 640,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method.")] = 3,
    pieces: Annotated[
        float,
        typer.Option(min=0, help="Begin no run after some seconds; the next call continues. 0: run to the end."),
    ] = 0.0,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if a goal is missed.")] = False,
    name: Annotated[str, typer.Option(help="Name of the files in --results.")] = "compressed_training",
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the picture.")] = _RESULTS,
) -> None:
    """Train each method with each seed, then print a table and draw the picture."""
    console, path, begin = bench_console(), results / f"{name}.json", time.monotonic()
    runs = stored_runs(path, steps) if pieces else []
    wanted = [(method, seed) for seed in range(seeds) for method in choose_names(only, METHODS, ";")]
    for method, seed in missing_runs(wanted, runs):
        if 0 < pieces < time.monotonic() - begin:
            console.print(f"{len(runs)} runs are done; call again to continue")
            return
        runs.append(train(method, seed, steps))
        console.print(f"{method}, seed {seed}: {runs[-1].last:.4f} held-out bits per byte")
        rows = [asdict(run) for run in runs]
        write_result(
            path, {"bench": "compressed_training", "steps": steps, "sequences": SEQUENCES, "runs": rows, **judged(runs)}
        )
    console.print(table(runs, steps))
    missed = judged(runs)["missed"]
    for line in missed:
        console.print(f"missed: {line}", soft_wrap=True, markup=False)
    console.print(f"written: {path}", soft_wrap=True)
    if draw(runs, steps, path.with_suffix(".png")):
        console.print(f"drawn: {path.with_suffix('.png')}", soft_wrap=True)
    if strict and missed:
        raise typer.Exit(1)


def stored_runs(path: Path, steps: int) -> list[Run]:
    """Return the runs of earlier calls.

    Raises:
        BadParameter: earlier runs have another number of steps.
    """
    if not path.is_file():
        return []
    stored = json.loads(path.read_text())
    if stored["steps"] != steps:
        raise typer.BadParameter(
            f"{path.name} has runs of {stored['steps']} steps, and --steps is {steps}; write another --name, or delete "
            "the file"
        )
    names = [one.name for one in fields(Run)]
    return [Run(**{key: item[key] for key in names if key in item}) for item in stored["runs"]]


def missing_runs(wanted: list[tuple[str, int]], runs: list[Run]) -> list[tuple[str, int]]:
    """Return the methods and seeds without a run."""
    done = {(run.method, run.seed) for run in runs}
    return [one for one in wanted if one not in done]


def train(method: str, seed: int, steps: int) -> Run:
    """Run `windlass train` on the text of the standard library."""
    chosen, commit = METHODS[method], run_facts()["commit"]
    with TemporaryDirectory(prefix="windlass-compressed-") as folder:
        Path(folder, "config.json").write_text(json.dumps(chosen.config(steps)))
        command = [sys.executable, "-m", "windlass", "train", "--config", f"{folder}/config.json", "--model", "tiny"]
        command += ["--data", "stdlib", "--nproc", str(chosen.ranks), "--steps", str(steps), "--seed", str(seed)]
        command += ["--eval-every", str(max(1, steps // 8)), "--sample-tokens", "0", "--out", f"{folder}/run"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        rows = read_rows(Path(folder, "run", "metrics.csv"))
    bits = {str(row.step): row.held_out_bits_per_byte for row in rows if row.held_out_bits_per_byte is not None}
    return Run(method, seed, bits, commit)


def judged(runs: list[Run]) -> dict[str, Any]:
    """Return the relative excess of each method's loss over AdamW's with the same seeds, and a line for each missed
    goal."""
    base = {run.seed: run.last for run in runs if run.method == BASE}
    above, missed = {}, []
    for name, method in METHODS.items():
        each = [run.last / base[run.seed] - 1 for run in runs if run.method == name and run.seed in base]
        if not each or name == BASE:
            continue
        above[name] = statistics.mean(each)
        if method.goal is not None and above[name] > method.goal:
            missed.append(f"{name}: {above[name]:+.2%} held-out bits per byte against AdamW, not {method.goal:.0%}")
    return {"above": above, "missed": missed}


def table(runs: list[Run], steps: int) -> Table:
    """Return a table of the held-out losses."""
    made = Table(title=f"tiny on stdlib, {steps} steps of {SEQUENCES} sequences of all ranks", title_justify="left")
    for column in ("optimizer", "ranks", "held-out bits/byte", "each seed", "against AdamW", "goal"):
        made.add_column(column, justify="left" if column == "optimizer" else "right", no_wrap=True)
    above = judged(runs)["above"]
    for name, method in METHODS.items():
        if last := [run.last for run in runs if run.method == name]:
            made.add_row(
                *(name, str(method.ranks), f"{statistics.mean(last):.4f}", ", ".join(f"{one:.4f}" for one in last)),
                f"{above[name]:+.2%}" if name in above else "",
                f"{method.goal:.0%}" if method.goal is not None else "",
            )
    return made


def draw(runs: list[Run], steps: int, path: Path) -> bool:
    """Plot the held-out loss over the steps, as the mean of the seeds. Without matplotlib, return False."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 5), dpi=140, layout="constrained")
    axes = figure.subplots()
    for method in METHODS:
        curves = [run.held_out for run in runs if run.method == method]
        if curves:
            at = sorted((step for step in curves[0] if int(step) >= steps // 8), key=int)
            axes.plot(
                [int(step) for step in at],
                [statistics.mean(curve[step] for curve in curves) for step in at],
                "o-",
                markersize=3,
                label=method,
            )
    axes.set(xlabel="step", ylabel="held-out bits per byte", title="the demo's model after equal tokens")
    # Limit the axis, because a method that diverges would hide the differences between the others.
    begins = [
        curve[min(curve, key=lambda step: abs(int(step) - steps // 8))] for curve in (run.held_out for run in runs)
    ]
    axes.set_ylim(0.97 * min(run.last for run in runs), 1.1 * statistics.median(begins))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(str(path))
    return True


if __name__ == "__main__":
    typer.run(main)
