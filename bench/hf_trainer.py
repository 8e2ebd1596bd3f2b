"""Time of a step of transformers' Trainer on windlass, compared with the plain Trainer and the Trainer on DeepSpeed
itself.

python bench/hf_trainer.py --ranks 2
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from windlass.cli.benches.bar_chart import BarPanel, draw_bars
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.cli.benches.deepspeed_baseline import build_tool_environment
from windlass.compat.stand_in_path import STAND_IN_FOLDER, find_hidden_deepspeed, stand_in_environment
from windlass.launch.start_ranks import threads_per_rank

_RESULTS = Path(__file__).parent / "results"
_RANK_SCRIPT = Path(__file__).parent / "rig" / "trainer_rank.py"
_EXPLANATION = """\
plain      the Trainer without DeepSpeed: without wrapper on one rank, with DistributedDataParallel on several
windlass   the same script with deepspeed=<configuration>, where `import deepspeed` is windlass
DeepSpeed  the same, where it imports DeepSpeed
step       median milliseconds of a step on the slowest rank, of the median round; including the Trainer's own work.
           Every variant runs once per round in fresh processes, every other round in reverse order.
losses     largest difference of a step's loss from the plain Trainer's
For DeepSpeed on several ranks, accelerate assumes GPUs. Without them DeepSpeed has rows only on one rank."""


def main(
    ranks: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    hidden_size: Annotated[int, typer.Option(min=32, help="Width of the Llama.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the Llama.")] = 6,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a sample.")] = 128,
    steps: Annotated[int, typer.Option(min=4, help="Steps of a round; the first two are not timed.")] = 12,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each variant.")] = 3,
    stages: Annotated[str, typer.Option(help="ZeRO stages, separated by commas.")] = "2,3",
    name: Annotated[str, typer.Option(help="Name of the files in --results. [trainer-RANKS]")] = "",
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the picture.")] = _RESULTS,
) -> None:
    """Run the variants alternately, print the table, write the JSON and the picture."""
    console = bench_console()
    work = {"ranks": ranks, "hidden_size": hidden_size, "layers": layers, "length": length, "steps": steps}
    ways: list[tuple[str, int | None]] = [("plain", None)]
    for stage in (int(text) for text in stages.split(",")):
        ways.append(("windlass", stage))
        if importlib.util.find_spec("deepspeed") is not None and find_hidden_deepspeed() is not None and ranks == 1:
            ways.append(("DeepSpeed", stage))
    if not any(way == "DeepSpeed" for way, _ in ways):
        console.print("DeepSpeed has no row: it is not installed, or there are several ranks without a GPU")
    result: dict[str, list[dict[str, Any]]] = {_row_label(*way): [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="windlass-trainer-") as folder:
        for number in range(rounds):
            for way, stage in ways if number % 2 == 0 else reversed(ways):
                result[_row_label(way, stage)].append(_run_once(Path(folder), way, stage, work))
    plain = result["plain"][0]["losses"]
    rows = {label: _summarize(turns, plain) for label, turns in result.items()}
    base = rows["plain"]["step_ms"]
    table = Table(
        title=f"{ranks} rank(s), {result['plain'][0]['parameters'] / 1e6:.1f}M parameters", title_justify="left"
    )
    for column in ("what", "step ms", "x plain", "spread", "losses"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for label, row in rows.items():
        row["x_plain"] = row["step_ms"] / base
        spread = f"{row['least_ms']:.0f} to {row['most_ms']:.0f}"
        table.add_row(label, f"{row['step_ms']:.0f}", f"{row['x_plain']:.2f}", spread, f"{row['loss_distance']:.1e}")
    console.print(table)
    console.print(_EXPLANATION, soft_wrap=True)
    stem = name or f"trainer-{ranks}"
    facts = {"bench": "trainer", **work, "rounds": rounds, "words": _EXPLANATION, "found": rows, "turns": result}
    console.print(f"written: {write_result(results / f'{stem}.json', facts)}", soft_wrap=True)
    panels = [BarPanel("a step of the Trainer", "ms", {label: round(row["step_ms"], 1) for label, row in rows.items()})]
    draw_bars(panels, results / f"{stem}.png", f"{ranks} rank(s) on CPU")


def _row_label(way: str, stage: int | None) -> str:
    return way if stage is None else f"{way}, stage {stage}"


def _run_once(folder: Path, way: str, stage: int | None, work: dict[str, Any]) -> dict[str, Any]:
    """Run one variant in fresh processes. Return the results of rank 0, with each step's time on its slowest rank."""
    (folder / "work.json").write_text(json.dumps({**work, "stage": stage}))
    env = {**os.environ, **build_tool_environment(), "OMP_NUM_THREADS": str(threads_per_rank(work["ranks"]))}
    env |= {"WINDLASS_LOG_LEVEL": "WARNING", "DS_ACCELERATOR": "cpu", "DS_LOG_LEVEL": "error", "HF_HUB_OFFLINE": "1"}
    kept = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(STAND_IN_FOLDER)]
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *kept])
    if way == "windlass":
        env |= stand_in_environment(env)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={work['ranks']}"]
    done = subprocess.run([*command, str(_RANK_SCRIPT), str(folder)], env=env, capture_output=True, text=True)
    if done.returncode:
        raise typer.BadParameter(f"{_row_label(way, stage)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    results = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(work["ranks"])]
    return {**results[0], "steps": [max(times) for times in zip(*(item["steps"] for item in results), strict=True)]}


def _summarize(turns: list[dict[str, Any]], plain: list[float]) -> dict[str, float]:
    medians = [1e3 * statistics.median(turn["steps"]) for turn in turns]
    distance = max(abs(a - b) for turn in turns for a, b in zip(turn["losses"], plain, strict=True))
    return {
        "step_ms": statistics.median(medians),
        "least_ms": min(medians),
        "most_ms": max(medians),
        "loss_distance": distance,
    }


if __name__ == "__main__":
    typer.run(main)
