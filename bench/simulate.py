"""Simulated step times, compared with published runs and with steps measured on 2 to 8 CPU ranks of this machine (also
over slow links), and extrapolated to 16,384 devices; and the speed of the simulator.

python bench/simulate.py --part published
python bench/simulate.py --part links --links 50M --rows 0:2
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rig.models import Sizes
from rig.published_runs import PublishedRun, cluster_of, published_runs
from rig.simulated_cases import CASES, EIGHT, LENGTH, LINKED, MODEL, MeasuredMachine, TimedCase
from rig.simulated_rank import TimedRank

from windlass.base.byte_counts import parse_bytes
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.cli.benches.rank_pool import RankPool
from windlass.config import load_config
from windlass.parallel.model_shape import ModelShape, from_transformers
from windlass.plan.planned_model import SHAPES
from windlass.simulate.cluster_file import known_cluster
from windlass.simulate.goodput import expected_goodput
from windlass.simulate.model_states import checkpoint_bytes, state_bytes_of_rank
from windlass.simulate.predict_step import predict_step, predict_work
from windlass.simulate.step_prediction import StepPrediction
from windlass.simulate.step_workload import describe_step

_RESULTS = Path(__file__).parent / "results"
PARTS = ("published", "extrapolated", "measured", "eight", "links")
PUBLISHED_TOLERANCE, MEASURED_TOLERANCE = 0.15, 0.10
CALIBRATION = (
    "ZeRO-Infinity 0.01T, 1 DGX-2",
    "MT-NLG 530B, 280 DGX-A100",
    "ZeRO-3 175B, 256 A100",
    "8B, 8 H100, compiled",
    "8B, 32 H200, compiled, FP8",
)
"""Runs that calibrate the share of a device's rates that training reaches, one for each device and framework."""
LARGE = 10_000  # least number of devices for which the table shows the duration of the simulation
_LENGTH = 8192  # tokens of a sample
# tokens of the global batch, by number of devices
_TOKENS = {8: 2**20, 64: 2**20, 512: 2**22, 4096: 2**24, 16_384: 2**24}
# Assumed hours between two failures of a device with its share of host and network, and seconds of a restart.
_MTBF_HOURS, _RESTART = 50_000.0, 600.0


def main(
    part: Annotated[str, typer.Option(help=f"{', '.join(PARTS)}, or several with commas.")] = ",".join(PARTS),
    rows: Annotated[str, typer.Option(help="Rows of measured parts to run, as START:STOP of their list.")] = ":",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of rates and steps; the middle error counts.")] = 5,
    links: Annotated[str, typer.Option(help="Bytes a second of each connection in the part links.")] = "100M,50M,25M",
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = _RESULTS,
) -> None:
    """Run the chosen parts, print their tables with every miss, and write simulate.json, which keeps the other parts,
    and the rows of measured parts that are not run now."""
    chosen = [name.strip() for name in part.split(",")]
    wrong = [name for name in chosen if name not in PARTS]
    if wrong:
        raise typer.BadParameter(f"{wrong[0]!r} is not a part; write some of {', '.join(PARTS)}", param_hint="--part")
    start, _, stop = rows.partition(":")
    span = slice(int(start or 0), int(stop) if stop else None)
    limits = [parse_bytes(rate.strip(), "--links") for rate in links.split(",")]
    path = results / "simulate.json"
    stored = json.loads(path.read_text()) if path.is_file() else {}
    found: dict[str, Any] = {name: stored[name] for name in PARTS if name in stored}
    cases = {
        "measured": CASES[span],
        "eight": EIGHT[span],
        "links": [replace(case, link=limit) for limit in limits for case in LINKED[span]],
    }
    for name in chosen:
        if name in cases:
            found[name] = compare_with_measured(cases[name], found.get(name, {}), rounds)
        else:
            found[name] = compare_with_published() if name == "published" else extrapolate()
        bench_console().print(TABLES[name](found[name]))
        write_result(path, {"bench": "simulate", **found})


def compare_with_published() -> list[dict[str, Any]]:
    """Return one row for each published run: predicted from data sheets, and with each device's rates calibrated on one
    run of the same framework."""
    runs = published_runs()
    shares = {run.kernels: _calibrate(run) for run in runs if run.name in CALIBRATION}
    rows = []
    for run in runs:
        start = time.perf_counter()
        found = _predict(run, 1.0)
        calibrated = run.predicted(_predict(run, shares[run.kernels]))
        predicted = run.predicted(found)
        rows.append(
            {
                "row": run.row,
                "name": run.name,
                "source": run.source,
                "unit": run.unit,
                "published": run.figure,
                "predicted": predicted,
                "error": predicted / run.figure - 1,
                "share": shares[run.kernels],
                "decides the share": run.name in CALIBRATION,
                "calibrated": calibrated,
                "calibrated error": calibrated / run.figure - 1,
                "seconds": found.seconds,
                "waits": {kind: seconds / found.seconds for kind, seconds in found.waits.items()},
                "assumed": run.assumed,
                "simulated in": time.perf_counter() - start,
            }
        )
    return rows


def _predict(run: PublishedRun, share: float) -> StepPrediction:
    """Predict a run on devices that reach `share` of the rates in the table of devices."""
    place = cluster_of(run)
    device = replace(
        place.device,
        matmul_efficiency=share * place.device.matmul_efficiency,
        attention_efficiency=share * place.device.attention_efficiency,
        memory_efficiency=share * place.device.memory_efficiency,
    )
    return predict_step(
        run.shape, load_config(run.full_config()), replace(place, device=device), world_size=run.ranks,
        length=run.length, checkpointing=run.checkpointing, fused=run.fused, linear_dtype=run.linear_dtype,
    )  # fmt: skip


def _calibrate(run: PublishedRun) -> float:
    """Return the share of its device's rates with which a run is predicted exactly."""
    low, high = 0.1, 1.5
    for _ in range(12):
        middle = (low + high) / 2
        predicted = run.predicted(_predict(run, middle))
        too_slow = predicted > run.figure if run.unit == "s" else predicted < run.figure
        low, high = (middle, high) if too_slow else (low, middle)
    return (low + high) / 2


def extrapolate() -> list[dict[str, Any]]:
    """Return the fastest of several meshes that fits for 7B, 70B, 405B and 1T on 8 to 16,384 H100.

    "searched in" is the time of all meshes, "step simulated in" that of the simulation of the slowest mesh alone.
    """
    rows: list[dict[str, Any]] = []
    for shape in ("7b", "70b", "405b", "1t"):
        for ranks in _TOKENS:
            start = time.perf_counter()
            best = _best_mesh(shape, ranks)
            if best is None:
                rows.append({"shape": shape, "ranks": ranks, "mesh": "", "seconds": None})
                continue
            rows.append({"shape": shape, "ranks": ranks, **best, "searched in": time.perf_counter() - start})
    return rows


def _best_mesh(shape: str, ranks: int) -> dict[str, Any] | None:
    samples = _TOKENS[ranks] // _LENGTH
    place, sizes = known_cluster("dgx-h100").with_devices(ranks), model_shape(shape)
    best: dict[str, Any] | None = None
    slowest = 0.0
    for stage, tp, pp in ((3, 1, 1), (3, 8, 1), (1, 8, 1), (1, 8, 4), (1, 8, 16)):
        data = ranks // (tp * pp)
        if ranks % (tp * pp) or not data or pp > sizes.layers or samples % data:
            continue
        config = load_config(
            {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": samples // data,
                "bf16": {"enabled": True},
                "communication_data_type": "bf16",
                "zero_optimization": {"stage": stage, "stage3_prefetch_bucket_size": 10**10},
                "parallel": {"tp": tp, "pp": pp, "tp_sequence_norms": tp > 1},
            }
        )
        work = describe_step(sizes, config, ranks, _LENGTH, checkpointing="full", fused=True)
        # Full checkpointing keeps the inputs of all layers and the activations of one layer.
        inputs = work.volumes.tokens * sizes.hidden * 2 * (sizes.layers + 20) // tp
        if state_bytes_of_rank(work, place) + inputs > 0.9 * place.device.memory:
            continue
        begun = time.perf_counter()
        found = predict_work(work, place)
        slowest = max(slowest, time.perf_counter() - begun)
        good = expected_goodput(
            ranks, _MTBF_HOURS * 3600, checkpoint_bytes(work) / (place.hosts * place.host.disk_write), _RESTART
        )
        row = {
            "mesh": f"stage {stage}, tp {tp}, pp {pp}, dp {data}",
            "seconds": found.seconds,
            "mfu": found.mfu,
            "tokens_per_second": found.tokens_per_second,
            "waits": {kind: seconds / found.seconds for kind, seconds in found.waits.items()},
            "goodput": good.goodput,
            "checkpoint_interval": good.daly,
        }
        if best is None or found.seconds < best["seconds"]:
            best = row
    return best and {**best, "step simulated in": slowest}


def model_shape(name: str) -> ModelShape:
    """Return the sizes of a model of `windlass plan --shape`."""
    return from_transformers({**SHAPES[name], "vocab_size": 32_000, "hidden_act": "silu"})


def compare_with_measured(cases: Sequence[TimedCase], before: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Measure this machine's rates and the step times of these cases; return them with the predictions.

    Args:
        before: Machines and rows of an earlier run, which are kept unless they are measured now.
    """
    env = {"OMP_NUM_THREADS": "1", "WINDLASS_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo"}
    machines: dict[str, Any] = dict(before.get("machines", {}))
    rows = {row["name"]: row for row in before.get("rows", [])}
    for ranks, link in dict.fromkeys((case.ranks, case.link) for case in cases):
        with RankPool(partial(TimedRank, ranks), ranks, label=f"{ranks} ranks", env=env) as pool:
            pool.ask("limit", link=link)
            for case in (one for one in cases if (one.ranks, one.link) == (ranks, link)):
                compared = []
                for _ in range(rounds):
                    measured = pool.ask("measure", case=case)
                    # All ranks wait for the slowest one.
                    seconds = {
                        key: statistics.median(map(max, zip(*(rank[key] for rank in measured), strict=True)))
                        for key in measured[0]
                    }
                    machine = MeasuredMachine.of_seconds(case, seconds)
                    steps = [max(step) for step in zip(*pool.ask("train", case=case), strict=True)]
                    compared.append((_compare(case, machine, statistics.median(steps), steps), machine))
                # Rates of a shared machine change within minutes, so each round has its own. The round of median error
                # counts.
                compared.sort(key=lambda one: one[0]["error"])
                rows[case.name], machine = compared[rounds // 2]
                rows[case.name]["errors"] = [row["error"] for row, _ in compared]
                machines[case.name] = asdict(machine)
                bench_console().print(f"{case.name}: {rows[case.name]['measured']:.3f} s", soft_wrap=True)
    return {"machines": machines, "rows": list(rows.values())}


def _compare(case: TimedCase, machine: MeasuredMachine, measured: float, steps: list[float]) -> dict[str, Any]:
    found = predict_step(_shape(MODEL), load_config(case.config()), machine.cluster(case), length=LENGTH)
    return {
        "name": case.name,
        "measured": measured,
        "steps": steps,
        "predicted": found.seconds,
        "error": found.seconds / measured - 1,
        "waits": found.waits,
    }


def _shape(sizes: Sizes) -> ModelShape:
    return sizes.shape()


def _published_table(rows: list[dict[str, Any]]) -> Table:
    misses = [_is_miss(row["error"]) for row in rows]
    others = [_is_miss(row["calibrated error"]) for row in rows if not row["decides the share"]]
    table = Table(
        title=f"published runs within {PUBLISHED_TOLERANCE:.0%}: {misses.count(False)} of {len(misses)} from data "
        f"sheets, {others.count(False)} of {len(others)} others once one run of each device decides its share",
        title_justify="left",
    )
    for name in ("row", "run", "published", "data sheets", "error", "calibrated", "error", ""):
        table.add_column(name, justify="left" if name == "run" else "right")
    for row in rows:
        figures = [f"{row[key]:,.4g}" for key in ("predicted", "calibrated")]
        miss = "decides" if row["decides the share"] else "MISS" if _is_miss(row["calibrated error"]) else ""
        table.add_row(
            str(row["row"]), row["name"], f"{row['published']:,.5g} {row['unit']}", figures[0],
            f"{row['error']:+.0%}", figures[1], f"{row['calibrated error']:+.0%}", miss,
        )  # fmt: skip
    return table


def _is_miss(error: float) -> bool:
    return abs(error) > PUBLISHED_TOLERANCE


def _extrapolated_table(rows: list[dict[str, Any]]) -> Table:
    # Rows of an older file have no time of a single step.
    large = [row["step simulated in"] for row in rows if row["ranks"] >= LARGE and row.get("step simulated in")]
    speed = f"; one step of {LARGE:,} devices or more simulated in at most {max(large):.1f} s" if large else ""
    table = Table(title=f"H100, samples of {_LENGTH:,} tokens, full checkpointing{speed}", title_justify="left")
    for name in ("model", "devices", "tokens a step", "mesh", "step", "MFU", "waits", "goodput"):
        table.add_column(name, justify="left" if name in ("model", "mesh", "waits") else "right")
    for row in rows:
        if row["seconds"] is None:
            table.add_row(row["shape"], f"{row['ranks']:,}", "", "none of the meshes fits", "", "", "", "")
            continue
        waits = ", ".join(f"{kind} {part:.0%}" for kind, part in row["waits"].items() if part >= 0.005)
        table.add_row(
            row["shape"], f"{row['ranks']:,}", f"{_TOKENS[row['ranks']]:,}", row["mesh"],
            f"{row['seconds']:.2f} s", f"{row['mfu']:.1%}", waits,
            f"{row['goodput']:.1%}",
        )  # fmt: skip
    return table


def _measured_table(found: dict[str, Any]) -> Table:
    rows = found["rows"]
    misses = sum(abs(row["error"]) > MEASURED_TOLERANCE for row in rows)
    table = Table(
        title=f"steps of CPU ranks: {len(rows) - misses} of {len(rows)} within {MEASURED_TOLERANCE:.0%}",
        title_justify="left",
    )
    for name in ("configuration", "measured", "predicted", "error", ""):
        table.add_column(name, justify="left" if name == "configuration" else "right")
    for row in rows:
        times = [f"{row[key] * 1e3:,.0f} ms" for key in ("measured", "predicted")]
        miss = "MISS" if abs(row["error"]) > MEASURED_TOLERANCE else ""
        table.add_row(row["name"], *times, f"{row['error']:+.1%}", miss)
    return table


TABLES: dict[str, Any] = {
    "published": _published_table,
    "extrapolated": _extrapolated_table,
    "measured": _measured_table,
    "eight": _measured_table,
    "links": _measured_table,
}


if __name__ == "__main__":
    typer.run(main)
