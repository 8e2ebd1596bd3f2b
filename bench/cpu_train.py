"""One training step of a Llama on CPU ranks: each stage of windlass, compared with its rivals in one run.

python bench/cpu_train.py                       # the 97.5M model, all engines: about half an hour on two quiet cores
python bench/cpu_train.py --growth              # how time and memory grow with parameters and ranks, as a picture
python bench/cpu_train.py --engines ddp,windlass-2-shm --hidden 256 --layers 4 --rounds 2
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rig.job import Size
from rig.measure import Effort, Measured, Say, measure
from rig.show import equality_line, notes, plain, table
from rig.targets import missed

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_engines import check_engine_name
from windlass.cli.benches.bench_results import write_result

_TRANSPORTS = ("shm", "gloo")
_RESULTS = Path(__file__).parent / "results"


def default_engines() -> list[str]:
    """Return every installed rival, and every stage on both transports."""
    deepspeed = ["ds1", "ds2", "ds3"] if importlib.util.find_spec("deepspeed") else []
    ours = [f"windlass-{stage}-{transport}" for transport in _TRANSPORTS for stage in range(4)]
    return ["none", "none-kept", "ddp", "zro", "fsdp2", "fsdp3", *deepspeed, *ours]


def main(
    engines: Annotated[str | None, typer.Option(help="Comma-separated. [all, both transports]")] = None,
    hidden: Annotated[int, typer.Option(min=64, help="Width of the model.")] = 768,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the model.")] = 12,
    length: Annotated[int, typer.Option(min=2, max=512, help="Tokens of a sequence.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences on a rank.")] = 1,
    ranks: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 2,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of each engine; 0: memory and losses only.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per round.")] = 4,
    check_steps: Annotated[int, typer.Option(min=2, help="Steps whose losses are compared first.")] = 4,
    growth: Annotated[bool, typer.Option("--growth", help="Three sizes, and 1, 2 and 4 ranks, as a picture.")] = False,
    name: Annotated[str | None, typer.Option(help="Name of the files in --results. [train, or growth]")] = None,
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = _RESULTS,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 1 if a target is missed.")] = False,
) -> None:
    """Measure, print the tables, write the JSON. Exit code 1: an engine fails or its losses differ, or --strict and a
    target is missed."""
    _set_rank_environment()
    console = bench_console()
    size = Size(hidden, layers, length, batch)
    effort = Effort(check_steps, rounds, steps)

    def say(line: str) -> None:
        console.print(line, style="dim", soft_wrap=True)

    if growth:
        chosen = _parse_engines(engines, None)
        measured = _measure_growth(chosen, size, effort, results / f"{name or 'growth'}.json", say)
    else:
        item = measure(_parse_engines(engines, default_engines()), size, ranks, effort, say)
        measured = [item]
        _print_measurement(item)
        path = write_result(results / f"{name or 'train'}.json", {"bench": "train", **plain(item)})
        console.print(f"written: {path}", soft_wrap=True)
    wrong = any(m.unequal or any(r.failure for r in m.results.values()) for m in measured)
    if wrong or (strict and any(missed(m) for m in measured)):
        raise typer.Exit(1)


def _measure_growth(chosen: list[str], size: Size, effort: Effort, path: Path, say: Say) -> list[Measured]:
    from rig import growth

    sizes = growth.sizes_up_to(size)
    by_size, by_ranks = growth.grow(chosen or growth.ENGINES, sizes, growth.RANKS, effort, say)
    unique = by_size + [m for m in by_ranks if m.ranks != 2]
    for item in unique:
        _print_measurement(item)
    data = {"by_size": [plain(m) for m in by_size], "by_ranks": [plain(m) for m in by_ranks]}
    write_result(path, {"bench": "growth", **data})
    growth.draw(by_size, by_ranks, path.with_suffix(".png"))
    bench_console().print(f"written: {path}, {path.with_suffix('.png')}", soft_wrap=True)
    return unique


def _print_measurement(measured: Measured) -> None:
    console = bench_console()
    console.print(equality_line(measured), soft_wrap=True)
    console.print(table(measured))
    for line in notes(measured):
        console.print(line, soft_wrap=True)


def _parse_engines(given: str | None, default: list[str] | None) -> list[str]:
    names = [name.strip() for name in given.split(",")] if given else default or []
    return [check_engine_name(name) for name in names]


def _set_rank_environment() -> None:
    """Set the environment of the ranks: one thread each, quiet libraries, loopback, and no WINDLASS_TRANSPORT, because
    the engine's name selects the transport."""
    os.environ.update(OMP_NUM_THREADS="1", WINDLASS_LOG_LEVEL="WARNING", TOKENIZERS_PARALLELISM="false")
    os.environ.pop("WINDLASS_TRANSPORT", None)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


if __name__ == "__main__":
    typer.run(main)
