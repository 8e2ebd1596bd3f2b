"""Experiment of `windlass bench transport`: the same training over each transport, with fresh ranks for each run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table

from windlass.base.errors import WindlassError
from windlass.cli.benches.bar_chart import BarPanel, draw_bars
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_launch import run_task
from windlass.cli.benches.bench_results import write_result
from windlass.cli.benches.training_bench import LOSS_TOLERANCE, BenchSizes, plain_config

NCCL_DISABLE_VARIABLES = ("NCCL_IB_DISABLE", "NCCL_SHM_DISABLE", "NCCL_P2P_DISABLE")
_SHORT_NAMES = {"NCCL_IB_DISABLE": "IB", "NCCL_SHM_DISABLE": "SHM", "NCCL_P2P_DISABLE": "P2P"}
CPU_TO_GPU_LOSS_TOLERANCE = 1e-3
"""Bound on the difference of losses between CPU and GPU, which sum products in different orders."""


@dataclass(frozen=True)
class TransportSetting:
    """Transport and its settings for one run.

    Attributes:
        device: device type of the ranks, `cpu` or `cuda`.
        env: variables to add to the environment of the ranks, which read them when they start.
    """

    label: str
    device: str
    env: dict[str, str]


@dataclass
class TransportMeasurement:
    """Measurements of all runs of one setting.

    Attributes:
        seconds: time of each timed step on its slowest rank.
        losses: loss of each step, as the mean over ranks; empty until a run succeeded.
        run_seconds: time of each run, from the start of its ranks to the end of the last rank.
    """

    setting: TransportSetting
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    run_seconds: list[float] = field(default_factory=list)
    transport: str = ""
    parameters: int = 0
    failure: str = ""


def available_settings(gpus: int, *, cpu: bool = True) -> list[TransportSetting]:
    """Return the settings to compare: with GPUs, nccl with all subsets of IB, SHM and P2P; then shm and gloo on CPUs.

    Args:
        gpus: number of GPUs of this machine.
        cpu: list the CPU transports even if there are GPUs.
    """
    found = []
    if gpus:
        for disabled in product("01", repeat=len(NCCL_DISABLE_VARIABLES)):
            env = dict(zip(NCCL_DISABLE_VARIABLES, disabled, strict=True))
            off = [_SHORT_NAMES[name] for name, value in env.items() if value == "1"]
            label = f"nccl without {', '.join(off)}" if off else "nccl"
            found.append(TransportSetting(label, "cuda", {"WINDLASS_TRANSPORT": "nccl", **env}))
    if cpu or not gpus:
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if gpus else {}
        found += [TransportSetting(name, "cpu", {"WINDLASS_TRANSPORT": name, **hidden}) for name in ("shm", "gloo")]
    return found


def run_transport_bench(
    settings: Sequence[TransportSetting], nproc: int, sizes: BenchSizes, stage: int, out: Path
) -> bool:
    """Train under each setting alternately, `sizes.rounds` times; print the table, write the JSON file and the picture.

    Args:
        settings: transport settings; the losses and times of the first are the reference of the comparison.
        stage: ZeRO stage.

    Returns:
        True if at least one setting ran and the losses of all that ran are equal.
    """
    console = bench_console()
    everything = [TransportMeasurement(setting) for setting in settings]
    alone = BenchSizes(**{**vars(sizes), "rounds": 1})
    for round_index in range(sizes.rounds):
        # reverse every second round, so that slow drift of the machine affects all settings equally
        for found in everything if round_index % 2 == 0 else reversed(everything):
            if not found.failure:
                console.print(
                    f"{round_index + 1} of {sizes.rounds}: {found.setting.label}, {nproc} fresh ranks", style="dim"
                )
                _run_once(found, nproc, alone, stage)
    ran = [found for found in everything if not found.failure]
    conclusions, equal = _compare_losses_and_times(ran, nproc)
    conclusions += [f"{one.setting.label}: absent, {one.failure}" for one in everything if one.failure]
    _report(ran, conclusions, nproc, sizes, stage, out)
    return equal


def _run_once(measurement: TransportMeasurement, nproc: int, sizes: BenchSizes, stage: int) -> None:
    label, start = measurement.setting.label, time.perf_counter()
    try:
        ranks = run_task(sizes.make_task({label: plain_config(sizes, stage=stage)}), nproc, measurement.setting.env)
    except WindlassError as error:  # some settings leave no usable transport; the failure is a result
        measurement.failure = str(error)
        return
    measurement.run_seconds.append(time.perf_counter() - start)
    measurement.seconds += [max(step) for step in zip(*(rank["seconds"][label] for rank in ranks), strict=True)]
    losses = [statistics.mean(step) for step in zip(*(rank["losses"][label] for rank in ranks), strict=True)]
    measurement.losses += losses
    measurement.transport, measurement.parameters = ranks[0]["transport"][label], ranks[0]["parameters"]


def _compare_losses_and_times(ran: Sequence[TransportMeasurement], nproc: int) -> tuple[list[str], bool]:
    if not ran:
        return ["no setting ran"], False
    reference = ran[0]
    far, furthest = [], 0.0
    for found in ran:
        apart = max(abs(a - b) for a, b in zip(found.losses, reference.losses, strict=True))
        bound = LOSS_TOLERANCE if found.setting.device == reference.setting.device else CPU_TO_GPU_LOSS_TOLERANCE
        furthest = max(furthest, apart)
        if not apart <= bound:  # `not <=` also catches NaN
            far.append(f"{found.setting.label} differs by {apart:.1e} (bound {bound:.0e})")
    summary = "NOT equal: " + "; ".join(far) if far else f"equal; the largest difference is {furthest:.1e}"
    conclusions = [f"losses: {summary}"]
    for found in ran[1:]:
        ratio = statistics.median(found.seconds) / statistics.median(reference.seconds)
        conclusions.append(f"{found.setting.label}: {ratio:.2f} x the time of {reference.setting.label}")
    if nproc == 1:
        conclusions.append("one rank has no peer, so these settings do not differ; use -n 2 or more")
    return conclusions, not far


def _report(
    ran: Sequence[TransportMeasurement], conclusions: list[str], nproc: int, sizes: BenchSizes, stage: int, out: Path
) -> None:
    rows = {found.setting.label: _result_row(found, nproc, sizes) for found in ran}
    console = bench_console()
    console.print(_result_table(rows, nproc, sizes, stage))
    for line in conclusions:
        console.print(line, soft_wrap=True)
    result = {
        "bench": "transport",
        "ranks": nproc,
        "stage": stage,
        "sizes": vars(sizes),
        "rows": rows,
        "verdicts": conclusions,
    }
    written = write_result(out / "transport.json", result)
    panels = [
        BarPanel("speed", "samples / s", {label: row["samples_per_second"] for label, row in rows.items()}),
        BarPanel("run time", "s, from start to end", {label: row["run_seconds"] for label, row in rows.items()}),
    ]
    drawn = bool(rows) and draw_bars(panels, out / "transport.png", f"windlass bench transport, {nproc} ranks")
    console.print(f"written: {written}{' and its .png' if drawn else ''}", soft_wrap=True)


def _result_row(measurement: TransportMeasurement, nproc: int, sizes: BenchSizes) -> dict[str, Any]:
    return {
        "device": measurement.setting.device,
        "transport": measurement.transport,
        "env": measurement.setting.env,
        "samples_per_second": nproc * sizes.batch / statistics.median(measurement.seconds),
        "run_seconds": statistics.median(measurement.run_seconds),
        "seconds": measurement.seconds,
        "run_seconds_of_each": measurement.run_seconds,
        "losses": measurement.losses,
        "parameters": measurement.parameters,
    }


def _result_table(rows: dict[str, dict[str, Any]], nproc: int, sizes: BenchSizes, stage: int) -> Table:
    parameters = next((row["parameters"] for row in rows.values()), 0)
    title = (
        f"{parameters / 1e6:.1f}M parameters, stage {stage}, {nproc} ranks x {sizes.batch} x {sizes.length} tokens; "
        "run time: of the whole run, including the start of its ranks"
    )
    table = Table(title=title, title_justify="left")
    for column in ("", "device", "samples/s", "ms/step", "spread", "run time s", "last loss"):
        table.add_column(column, justify="left" if column in ("", "device") else "right")
    for label, row in rows.items():
        seconds = row["seconds"]
        table.add_row(
            label,
            row["device"],
            f"{row['samples_per_second']:.2f}",
            f"{statistics.median(seconds) * 1e3:.1f}",
            f"{min(seconds) * 1e3:.0f}-{max(seconds) * 1e3:.0f}",
            f"{row['run_seconds']:.1f}",
            f"{row['losses'][-1]:.4f}",
        )
    return table
