"""Benchmarks of tensor, sequence, expert and pipeline parallelism.

Parts: the bytes of each mesh axis, compared with formulas; the step time, also on slow links, compared with data
parallelism and with torch's own implementations; the longest sequence under a memory cap.

python bench/parallel_axes.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rig import lengths, method_comparison
from rig.axis_bytes import count
from rig.axis_cases import CASES, Line, unequal
from rig.chosen_names import choose_names
from rig.compared_methods import EXPLANATION, FIELDS, Load
from rig.techniques import ROWS

from windlass.base.byte_counts import parse_bytes
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result

_RESULTS = Path(__file__).parent / "results"
TIMED_AXES = tuple(axis for axis in FIELDS if axis != "link")
BENCH_PARTS = ("bytes", *TIMED_AXES, "link", "length")


def main(
    only: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(BENCH_PARTS)}.")] = ",".join(BENCH_PARTS),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each method.")] = 9,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per round.")] = 3,
    samples: Annotated[int, typer.Option(min=2, help="Sequences of all ranks together, an even number.")] = 4,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of a sequence in timed steps.")] = 256,
    links: Annotated[str, typer.Option(help="Bytes per second of slow links for dp and pp.")] = "100M,25M,10M",
    cap: Annotated[str, typer.Option(help="Memory limit of a rank for growing sequences.")] = "160M",
    longest: Annotated[int, typer.Option(min=256, help="Maximum tokens of a sequence.")] = 1 << 15,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if a step takes longer than torch's own.")] = False,
    name: Annotated[str, typer.Option(help="Name of the files in --results.")] = "parallel",
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the picture.")] = _RESULTS,
) -> None:
    """Run the chosen parts, print tables, write the JSON and the picture. The exit code is 1 if bytes or losses differ,
    or with --strict if a step takes longer than torch's."""
    parts = choose_names(only, BENCH_PARTS, ",")
    if samples % 2:
        raise typer.BadParameter(f"--samples {samples} can't be halved; write an even number")
    os.environ.update(OMP_NUM_THREADS="1", WINDLASS_LOG_LEVEL="ERROR")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.pop("WINDLASS_TRANSPORT", None)
    console, result, wrong = bench_console(), {}, list[str]()
    if "bytes" in parts:
        result["bytes"], more = _measure_axis_bytes(console)
        wrong += more
    loads = {axis: [Load(samples, tokens)] for axis in parts if axis in TIMED_AXES}
    if "link" in parts:
        loads["link"] = [Load(samples, tokens, parse_bytes(rate.strip(), "--links")) for rate in links.split(",")]
    for axis, each in loads.items():
        if axis not in TIMED_AXES:
            os.environ["WINDLASS_TRANSPORT"] = "gloo"  # the other axes use shared memory, which has no link to pace
        races = [_time_methods(axis, load, rounds, steps, console) for load in each]
        result[axis] = (
            method_comparison.plain(races[0])
            if axis in TIMED_AXES
            else [method_comparison.plain(race) for race in races]
        )
        wrong += [f"{axis}: the losses of {item} differ" for race in races for item in race.unequal]
        wrong += [line for race in races for line in race.slower] if strict else []
    if "link" in loads:
        console.print(method_comparison.links(races))
    os.environ.pop("WINDLASS_TRANSPORT", None)
    if loads:
        result["limit"] = EXPLANATION
        console.print(f"limit: {EXPLANATION}")
    if "length" in parts:
        result["length"], more = _measure_longest_sequence(
            console, parse_bytes(cap, "--cap"), longest, results / f"{name}-length.png"
        )
        wrong += more
    path = write_result(results / f"{name}.json", {"bench": "parallel", **result, "wrong": wrong})
    console.print(f"written: {path}", soft_wrap=True)
    for line in wrong:
        console.print(f"WRONG: {line}", soft_wrap=True, markup=False)
    if wrong:
        raise typer.Exit(1)


def _time_methods(axis: str, load: Load, rounds: int, steps: int, console: Console) -> method_comparison.Comparison:
    race = method_comparison.race(axis, load, rounds, steps, console.print)
    console.print(method_comparison.table(race))
    for line in method_comparison.notes(race):
        console.print(line, soft_wrap=True, markup=False)  # the text of an error may contain brackets
    return race


def _measure_axis_bytes(console: Console) -> tuple[Any, list[str]]:
    lines = count(CASES, console.print)
    console.print(_axis_bytes_table(lines))
    differ = unequal(lines)
    console.print(f"bytes: {len(lines) - len(differ)} of {len(lines)} lines are equal to the byte")
    text = [f"{item.case}: {item.axis} {item.operation} is {item.measured:,}" for item in differ]
    return [line.plain() for line in lines], text


def _axis_bytes_table(lines: list[Line]) -> Table:
    made = Table(title="bytes that a rank receives in a step, transport gloo", title_justify="left")
    for column in ("mesh", "stage of the pipeline", "axis", "operation"):
        made.add_column(column)
    for column in ("formula", "scalars", "measured", ""):
        made.add_column(column, justify="right", no_wrap=True)
    before = ""
    for item in lines:
        numbers = (f"{value:,}" for value in (item.formula, item.scalars, item.measured))
        mesh, before = ("" if item.case == before else item.case), item.case
        made.add_row(mesh, str(item.pipe), item.axis, item.operation, *numbers, "equal" if item.equal else "DIFFERENT")
    return made


def _measure_longest_sequence(console: Console, cap: int, longest: int, picture: Path) -> tuple[Any, list[str]]:
    result = lengths.stretch(list(ROWS), cap, first=128, most=longest, say=console.print)
    console.print(lengths.table(result, cap))
    console.print(lengths.EXPLANATION, soft_wrap=True)
    apart = lengths.losses_apart(result)
    console.print(f"losses of {len(result)} rows on one sequence: at most {apart:.1e} apart")
    if lengths.draw(result, cap, picture):
        console.print(f"drawn: {picture}", soft_wrap=True)
    return lengths.plain(result, cap), [] if apart <= lengths.EQUAL_LOSS else [f"length: losses are {apart:.1e} apart"]


if __name__ == "__main__":
    typer.run(main)
