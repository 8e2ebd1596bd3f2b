"""Quality of a compressed language model and of a compressed classifier, for several seeds, compared with goals.

A piece is one compression setting with one seed. Results are stored after each piece, so a repeated command resumes.

python bench/compress.py --pieces 4      # measure the next four pieces
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rig.compressed_classifier import CLASSIFIERS, measure_classifier
from rig.compressed_language_model import LANGUAGE_MODELS, MODELS, measure_language_model, train_base

from windlass.cli.benches.bar_chart import BarPanel, draw_bars
from windlass.cli.benches.bench_console import bench_console as make_console
from windlass.cli.benches.bench_results import run_facts, write_result

_ROOT = Path(__file__).parent
_CONSOLE = make_console()
Piece = tuple[str, str, int]  # kind of model, row, seed


def main(
    pieces: Annotated[int, typer.Option(min=0, help="Pieces to run now; 0: all that are left.")] = 0,
    seconds: Annotated[float, typer.Option(help="No piece begins after so many seconds.")] = 1e9,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    steps: Annotated[int, typer.Option(min=10, help="Steps of the language model's training.")] = 900,
    model: Annotated[str, typer.Option(help=f"The language model: {' or '.join(MODELS)}.")] = "2.6M",
    only: Annotated[str, typer.Option(help="Part of the names of rows.")] = "",
    work: Annotated[Path, typer.Option(help="Trained models, which later runs use again.")] = Path("build/compress"),
    results: Annotated[
        Path | None,
        typer.Option(help="The JSON file, whose pieces are not measured again; the picture lies beside it."),
    ] = None,
) -> None:
    """Run the remaining pieces of the measurement, then print the table and draw the picture."""
    torch.set_num_threads(threads)
    if model not in MODELS:
        raise typer.BadParameter(f"--model {model}: there are {' and '.join(MODELS)}")
    is_demo = not MODELS[model]
    results = results or _ROOT / "results" / ("compress.json" if is_demo else f"compress_{model}.json")
    work.mkdir(parents=True, exist_ok=True)
    done = _stored_pieces(results, steps)
    started, left, commit = time.monotonic(), 0, run_facts()["commit"]
    for kind, row, seed in _order(seeds, classifies=is_demo):
        name = f"{kind}/{row}/{seed}"
        if name in done or only not in name:
            continue
        if (pieces and left >= pieces) or time.monotonic() - started > seconds:
            break
        left += 1
        before = time.process_time()
        base = train_base(work / (f"base-{steps}" if is_demo else f"base-{model}-{steps}"), steps, model)
        measured = _MEASURES[kind](row, seed, work, base, steps)
        done[name] = {**measured, "processor_seconds": round(time.process_time() - before, 1), "commit": commit}
        rows = _summary(done)
        write_result(results, {"model": model, "steps": steps, "rows": rows, "pieces": done})
        _CONSOLE.print(f"{name}: {done[name]}")
    rows = _summary(done)
    _print(rows)
    language = {row["name"]: 100 * row["loss"] for row in rows if row["kind"] == "language" and row["loss"] is not None}
    classes = {row["name"]: 100 * row["accuracy"] for row in rows if row["kind"] == "classifier"}
    panels = [BarPanel("Held-out bits per byte", "% above the trained model", language)] if language else []
    panels += [BarPanel("Classifier", "% of held-out texts", classes)] if classes else []
    if panels:
        draw_bars(panels, results.with_suffix(".png"), f"Compressed models, mean of the seeds ({model})")


def _stored_pieces(results: Path, steps: int) -> dict[str, Any]:
    """Return the pieces of earlier runs.

    Raises:
        BadParameter: earlier runs have another number of steps.
    """
    if not results.is_file():
        return {}
    stored = json.loads(results.read_text())
    if stored["steps"] != steps:
        raise typer.BadParameter(
            f"{results.name} has pieces of {stored['steps']} steps, and --steps is {steps}; write another --results"
        )
    return dict(stored["pieces"])


def _order(seeds: int, *, classifies: bool) -> list[Piece]:
    """Return all pieces: the first seed of all rows, then the other seeds of the rows that are trained."""
    kinds: dict[str, dict[str, Any]] = {
        "language": LANGUAGE_MODELS,
        **({"classifier": CLASSIFIERS} if classifies else {}),
    }
    return [
        (kind, row, seed)
        for seed in range(seeds)
        for kind, rows in kinds.items()
        for row, setting in rows.items()
        if seed == 0 or setting.is_trained
    ]


def _language(row: str, seed: int, work: Path, base: Path, steps: int) -> dict[str, Any]:
    return measure_language_model(row, seed, base, steps)


def _classifier(row: str, seed: int, work: Path, base: Path, steps: int) -> dict[str, Any]:
    return measure_classifier(row, seed, base, work / f"classifier{seed}.pt")


_MEASURES: dict[str, Callable[[str, int, Path, Path, int], dict[str, Any]]] = {
    "language": _language,
    "classifier": _classifier,
}


def _summary(done: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for kind, known in (("language", LANGUAGE_MODELS), ("classifier", CLASSIFIERS)):
        for name, setting in known.items():
            found = [copy.copy(done[key]) for key in done if key.startswith(f"{kind}/{name}/")]
            if not found:
                continue
            row: dict[str, Any] = {"kind": kind, "name": name, "seeds": len(found), "goal": setting.goal}
            for key in ("loss", "bits", "accuracy", "bytes", "times"):
                values = [one[key] for one in found if key in one]
                row[key] = statistics.mean(values) if values else None
                if key in ("loss", "accuracy") and len(values) > 1:
                    row["spread"] = max(values) - min(values)
            rows.append(row)
    return rows


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Compressed models: mean of the seeds")
    for column in ("row", "seeds", "loss or accuracy", "spread", "goal", "bytes", "times smaller"):
        table.add_column(column, justify="left" if column in ("row", "goal") else "right")
    for row in rows:
        value = f"+{100 * row['loss']:.2f} %" if row["kind"] == "language" else f"{100 * row['accuracy']:.1f} %"
        spread = f"{100 * row['spread']:.2f}" if "spread" in row else ""
        size = f"{row['bytes']:,.0f}" if row["bytes"] else ""
        times = f"{row['times']:.1f}" if row["times"] else ""
        table.add_row(f"{row['kind']}: {row['name']}", str(row["seeds"]), value, spread, row["goal"], size, times)
    _CONSOLE.print(table)


if __name__ == "__main__":
    typer.run(main)
