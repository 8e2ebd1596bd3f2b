"""Time and memory of a checkpoint: windlass, blocking and async, compared with torch.save,
torch.distributed.checkpoint and DeepSpeed.

python bench/checkpoint_speed.py --path /mnt/nvme
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from disk_tier_rate import RawDirectIo
from rich.table import Table

from windlass.base.errors import StorageError
from windlass.cli.benches.bar_chart import BarPanel, draw_bars
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.launch.start_ranks import launch, threads_per_rank
from windlass.storage import DiskTier

_RESULTS = Path(__file__).parent / "results"
_RANK_SCRIPT = Path(__file__).parent / "rig" / "checkpoint_rank.py"
_STATE_BYTES_PER_PARAMETER = 12  # bytes per parameter: float32 weight and two moments
_BLOCK_BYTES, _QUEUE_DEPTH = 1 << 20, 32
SAVE_METHODS = (
    "windlass",
    "windlass async",
    "torch.save",
    "torch.save, no crc32",
    "DCP",
    "DCP async",
    "DeepSpeed",
)
_EXPLANATION = """\
seconds    from the call until the last byte is durable (fsync), on the slowest rank, with no other work
of raw     median GB/s over the median rate at which the faster of bench/disk_tier_rate.py's raw writers (direct I/O,
           threads and a ring) wrote as many bytes to a new file, before and after all saves
in place   the same over the rate at which the raw writers overwrote an existing file
blocked    duration of the call itself, during which training is blocked
10 steps   additional time of the next ten steps, during which an async save is written, over ten undisturbed steps of
           the same round
Each rank of torch.save and of DCP writes the same tensors as in windlass's checkpoint; torch.save is followed by an
fsync. DCP uses its default writer, which fsyncs; DCP async has its own gloo group. windlass checksums every entry
(crc32), writes under a temporary name and renames; DCP has no checksums. DeepSpeed is its save_checkpoint at the same
stage, then an fsync of its files; its GB/s count the same bytes, though at stages 1 and 2 it writes the parameters a
second time, with the model."""


def main(
    width: Annotated[int, typer.Option(min=64, help="Width of the model's linear layers.")] = 1024,
    layers: Annotated[
        int, typer.Option(min=1, help="Number of layers, of width^2 parameters with 12 bytes of state each.")
    ] = 80,
    batch: Annotated[int, typer.Option(min=1, help="Rows per rank.")] = 32,
    ranks: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each method.")] = 5,
    steps: Annotated[int, typer.Option(min=2, help="Steps that are timed after a save.")] = 10,
    path: Annotated[Path, typer.Option(help="A folder on the disk to use.")] = Path("."),
    only: Annotated[str, typer.Option(help=f"Methods, separated by semicolons: {'; '.join(SAVE_METHODS)}.")] = "",
    name: Annotated[str, typer.Option(help="Name of the files in --results.")] = "checkpoint",
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the picture.")] = _RESULTS,
) -> None:
    """Save with each method in turn, print the table, write the JSON and the picture."""
    chosen = [entry.strip() for entry in only.split(";") if entry.strip()] or list(SAVE_METHODS)
    for item in chosen:
        if item not in SAVE_METHODS:
            raise typer.BadParameter(f"{item!r} is unknown; separate methods by semicolons: {'; '.join(SAVE_METHODS)}")
    console = bench_console()
    if "DeepSpeed" in chosen and importlib.util.find_spec("deepspeed") is None:
        chosen.remove("DeepSpeed")
        console.print("DeepSpeed: not installed (pip install --no-build-isolation deepspeed), so it has no row")
    work = {"width": width, "layers": layers, "batch": batch, "stage": stage, "rounds": rounds, "steps": steps}
    expected = layers * width * width * _STATE_BYTES_PER_PARAMETER
    with tempfile.TemporaryDirectory(prefix="windlass-checkpoint-", dir=path) as folder:
        raw = _measure_raw_disk(Path(folder), expected, rounds)
        Path(folder, "work.json").write_text(json.dumps({**work, "names": chosen}))
        env = {"WINDLASS_LOG_LEVEL": "WARNING", "OMP_NUM_THREADS": str(threads_per_rank(ranks))}
        if code := launch([str(_RANK_SCRIPT), folder], ranks, env=env):
            raise typer.Exit(code)
        received = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(ranks)]
        raw += _measure_raw_disk(Path(folder), expected, rounds)
    nbytes = sum(rank["bytes"] for rank in received)
    best, again = (statistics.median(rates) for rates in zip(*raw, strict=True))
    result = {entry: _summarize([rank["saves"][entry] for rank in received], nbytes, best, again) for entry in chosen}
    step = statistics.median(
        value for rank in received for save in rank["saves"].values() for value in save["plain_step"]
    )
    console.print(_result_table(result, nbytes, best, again, step, ranks))
    console.print(_EXPLANATION, soft_wrap=True)
    facts = {
        "bytes": nbytes,
        "ranks": ranks,
        "step_s": step,
        "raw_write_new_and_in_place_gb_s": raw,
        "words": _EXPLANATION,
    }
    written = write_result(
        results / f"{name}.json", {"bench": "checkpoint", **work, **facts, "found": result, "by_rank": received}
    )
    console.print(f"written: {written}", soft_wrap=True)
    panels = [
        BarPanel("until durable", "GB/s", {entry: round(values["gb_s"], 3) for entry, values in result.items()}),
        BarPanel(
            "training is blocked", "ms", {entry: round(values["blocked_ms"], 1) for entry, values in result.items()}
        ),
        BarPanel(f"next {steps} steps", "ms longer", {entry: round(v["behind_ms"], 1) for entry, v in result.items()}),
    ]
    draw_bars(panels, results / f"{name}.png", f"{nbytes / 1e9:.2f} GB of {ranks} ranks; raw disk {best:.2f} GB/s")


def _measure_raw_disk(folder: Path, nbytes: int, rounds: int) -> list[tuple[float, float]]:
    """Return for each round the GB/s of raw writes to a new file and of overwriting it, by the best writer."""
    nbytes = max(nbytes // _BLOCK_BYTES, 2 * _QUEUE_DEPTH) * _BLOCK_BYTES
    with DiskTier([folder], queue_depth=_QUEUE_DEPTH) as tier:
        try:
            memory = tier.allocate_buffer(min(nbytes, 256 << 20) // _BLOCK_BYTES * _BLOCK_BYTES).random_()
            return [_measure_raw_round(folder, nbytes, memory) for _ in range(rounds + 1)][1:]
        except OSError as error:
            raise StorageError(f"{folder}: no raw rate to compare with ({error}); name a folder on a disk") from error


def _measure_raw_round(folder: Path, nbytes: int, memory: Any) -> tuple[float, float]:
    rates: list[tuple[float, float]] = []
    ways = 1
    while len(rates) < ways:
        with closing(RawDirectIo(folder, nbytes, _BLOCK_BYTES, _QUEUE_DEPTH, memory)) as raw:
            works = list(raw.timed_works(True, "write").values())
            ways, work = len(works), works[len(rates)]
            rates.append((_measure_rate(work, nbytes), _measure_rate(work, nbytes)))
    new, again = zip(*rates, strict=True)
    return max(new), max(again)


def _measure_rate(work: Any, nbytes: int) -> float:
    start = time.perf_counter()
    work()
    return nbytes / (time.perf_counter() - start) / 1e9


def _summarize(of_ranks: list[dict[str, list[float]]], nbytes: int, raw: float, again: float) -> dict[str, Any]:
    """Return medians over the rounds of one method; a round's times are those of its slowest rank."""
    slowest = {
        key: [max(values) for values in zip(*(item[key] for item in of_ranks), strict=True)] for key in of_ranks[0]
    }
    seconds = statistics.median(slowest["seconds"])
    steps = zip(slowest["steps"], slowest["plain_steps"], strict=True)
    plain = statistics.median(slowest["plain_steps"])
    behind = statistics.median(after - before for after, before in steps)
    return {
        "seconds": seconds,
        "gb_s": nbytes / seconds / 1e9,
        "of_raw": nbytes / seconds / 1e9 / raw,
        "in_place": nbytes / seconds / 1e9 / again,
        "blocked_ms": 1e3 * statistics.median(slowest["blocked"]),
        "blocked_steps": statistics.median(slowest["blocked"]) / statistics.median(slowest["plain_step"]),
        "behind_ms": 1e3 * behind,
        "behind_share": behind / plain,
    }


def _result_table(
    found: dict[str, dict[str, Any]], nbytes: int, raw: float, again: float, step: float, ranks: int
) -> Table:
    title = (
        f"{nbytes / 1e9:.2f} GB, {ranks} ranks, raw disk {raw:.2f} GB/s (in place {again:.2f}), a step "
        f"{1e3 * step:.0f} ms"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    for column in ("seconds", "GB/s", "of raw", "in place", "blocked ms", "= steps", "10 steps +ms", "+%"):
        table.add_column(column, justify="right")
    for name, item in found.items():
        table.add_row(
            name,
            f"{item['seconds']:.2f}",
            f"{item['gb_s']:.2f}",
            f"{item['of_raw']:.0%}",
            f"{item['in_place']:.0%}",
            f"{item['blocked_ms']:.0f}",
            f"{item['blocked_steps']:.2f}",
            f"{item['behind_ms']:.0f}",
            f"{item['behind_share']:.0%}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
