"""Held-out loss over time of a synchronous and an asynchronous parameter server whose workers are unequally fast.

python bench/parameter_server.py                       # examples/parameter_server.py in both modes: a minute
python bench/parameter_server.py --seconds 5
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result

_RESULTS = Path(__file__).parent / "results"
_EXAMPLE = Path(__file__).parents[1] / "examples" / "parameter_server.py"
_MODES = ("synchronous", "asynchronous")


def main(
    seconds: Annotated[float, typer.Option(min=1, help="Duration of each run.")] = 25,
    step_seconds: Annotated[float, typer.Option(help="Least duration of a step of a fast worker.")] = 0.05,
    slow: Annotated[float, typer.Option(help="Steps of the slow worker take so many times as long.")] = 8,
    servers: Annotated[int, typer.Option(min=1)] = 2,
    workers: Annotated[int, typer.Option(min=1, help="Worker 3 is the slow one.")] = 4,
    name: Annotated[str, typer.Option(help="Name of the files in --results.")] = "parameter_server",
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the picture.")] = _RESULTS,
) -> None:
    """Run the example in both modes. Write the curves, points of seconds, updates and held-out loss, and draw them."""
    console = bench_console()
    curves: dict[str, list[list[float]]] = {}
    with TemporaryDirectory(prefix="windlass-servers-") as folder:
        for mode in _MODES:
            command = [sys.executable, "-m", "windlass", "run", "--servers", str(servers), "--workers", str(workers)]
            command += [str(_EXAMPLE), "--mode", mode, "--seconds", str(seconds), "--step-seconds", str(step_seconds)]
            done = subprocess.run([*command, "--slow", str(slow), "--out", folder], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
            curves[mode] = json.loads((Path(folder) / f"{mode}.json").read_text())["curve"]
            console.print(done.stdout.strip())
    found = {
        "bench": "parameter_server",
        "settings": {"servers": servers, "workers": workers, "step_seconds": step_seconds, "slow": slow},
        "curves": curves,
        "summary": summary(curves),
    }
    written = write_result(results / f"{name}.json", found)
    _example().draw(curves, results / f"{name}.png")
    console.print(f"written: {written} and its .png", soft_wrap=True)


def summary(curves: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Return the updates and the last loss of each mode, and the seconds until asynchronous updates reach the loss at
    which synchronous ones end; None if they do not.
    """
    ends = {mode: {"updates": curve[-1][1], "loss": curve[-1][2]} for mode, curve in curves.items()}
    goal = ends["synchronous"]["loss"]
    reached = next((seconds for seconds, _, loss in curves["asynchronous"] if loss <= goal), None)
    return {**ends, "seconds_to_equal_loss": reached}


def _example() -> Any:
    spec = spec_from_file_location("parameter_server_example", _EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    typer.run(main)
