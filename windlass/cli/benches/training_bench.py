"""Experiments of `windlass bench stages` and `precision`. Configurations are timed alternately; the memory of each
configuration is measured in a separate run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from windlass.base.errors import WindlassError
from windlass.cli.benches.bar_chart import BarPanel, draw_bars
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_launch import run_task
from windlass.cli.benches.bench_results import write_result
from windlass.cli.benches.bench_tasks import TrainingTask
from windlass.cli.benches.expected_order import compare_with_expected_order

STAGES = ("stage 0", "stage 1", "stage 2", "stage 3")
PRECISIONS = ("fp32", "bf16", "fp16")
_TIME_TOLERANCE, _MEMORY_TOLERANCE = 0.05, 0.03
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True)
class BenchSizes:
    """Sizes of the model and of the experiment; see `TrainingTask`."""

    hidden: int
    layers: int
    length: int
    batch: int
    rounds: int
    steps: int
    vocabulary: int = 4096

    def make_task(self, configs: dict[str, dict[str, Any]]) -> TrainingTask:
        """Create the task that trains all configurations alternately without measuring memory."""
        return TrainingTask(
            configs, self.vocabulary, self.hidden, self.layers, self.length, self.batch, self.rounds, self.steps, False
        )


@dataclass(frozen=True)
class ConfigMeasurement:
    """Measurements of one configuration.

    Attributes:
        seconds: time of each timed step on its slowest rank; `run_seconds` is their sum.
        peak_memory, peak_memory_of_ranks: peak bytes of the rank with the highest peak, and of each rank.
        memory_kind: name of the memory counter.
        copied_bytes: bytes copied in a step, by direction, on the rank that copies most; empty if the engine does not
            count them.
    """

    seconds: list[float]
    samples_per_second: float
    run_seconds: float
    peak_memory: int
    peak_memory_of_ranks: list[int]
    memory_kind: str
    copied_bytes: dict[str, int]
    losses: list[float]
    transport: str
    parameters: int


def run_stages_bench(nproc: int, sizes: BenchSizes, out: Path) -> bool:
    """Compare the stages; print their order in speed and in memory, and the order in DeepSpeed's tutorials.

    Returns:
        True if all stages had the same losses.
    """
    rows, _ = measure_configs({f"stage {stage}": plain_config(sizes, stage=stage) for stage in range(4)}, sizes, nproc)
    reference = rows["stage 0"].losses
    apart = max(abs(a - b) for row in rows.values() for a, b in zip(row.losses, reference, strict=True))
    times = {label: statistics.median(row.seconds) * 1e3 for label, row in rows.items()}
    memory = {label: row.peak_memory / row.parameters for label, row in rows.items()}
    conclusions = [
        f"losses: {'equal' if apart <= LOSS_TOLERANCE else 'NOT equal'}; the largest difference is {apart:.1e}",
        compare_with_expected_order("speed (ms a step)", times, STAGES, _TIME_TOLERANCE),
        compare_with_expected_order("memory (bytes a parameter)", memory, tuple(reversed(STAGES)), _MEMORY_TOLERANCE),
    ]
    report_bench("stages", rows, conclusions, nproc, sizes, out)
    return apart <= LOSS_TOLERANCE


def run_precision_bench(nproc: int, sizes: BenchSizes, stage: int, out: Path) -> bool:
    """Compare fp32, bf16 and fp16 at one stage.

    Returns:
        True if every loss fell and is finite.
    """
    configs = {"fp32": plain_config(sizes, stage=stage)}
    for name in PRECISIONS[1:]:
        configs[name] = {**plain_config(sizes, stage=stage), name: {"enabled": True}}
    configs["fp16"]["fp16"]["initial_scale_power"] = 12  # a scale that does not overflow, so that no step is skipped
    rows, _ = measure_configs(configs, sizes, nproc)
    learned = {label: row.losses[-1] < row.losses[0] for label, row in rows.items()}
    full = rows["fp32"].losses[-1]
    conclusions = [
        f"{label}: loss {row.losses[0]:.4f} -> {row.losses[-1]:.4f} ({row.losses[-1] - full:+.4f} against fp32), "
        f"{statistics.median(row.seconds) / statistics.median(rows['fp32'].seconds):.2f} x the time and "
        f"{row.peak_memory / rows['fp32'].peak_memory:.2f} x the memory of fp32"
        f"{'' if learned[label] else '; did NOT learn'}"
        for label, row in rows.items()
    ]
    report_bench("precision", rows, conclusions, nproc, sizes, out)
    return all(learned.values())


def plain_config(sizes: BenchSizes, *, stage: int) -> dict[str, Any]:
    """Return a configuration with AdamW, gradient clipping at norm 1 and a ZeRO stage."""
    return {
        "train_micro_batch_size_per_gpu": sizes.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }


def measure_configs(
    configs: dict[str, dict[str, Any]],
    sizes: BenchSizes,
    nproc: int,
    env: dict[str, str] | None = None,
    optional_configs: dict[str, dict[str, Any]] | None = None,
) -> tuple[dict[str, ConfigMeasurement], list[str]]:
    """Measure the memory of each configuration in a separate run, then the step times of all in one run,
    alternately.

    Args:
        configs: configurations by label; see `TrainingTask`.
        env: variables to add to the environment of the ranks.
        optional_configs: further configurations, which may fail on this machine.

    Returns:
        Measurements by label, and the labels of optional configurations that failed.

    Raises:
        WindlassError: a configuration that is not optional failed.
    """
    console = bench_console()
    alone: dict[str, list[dict[str, Any]]] = {}
    failed = []
    every = {**configs, **(optional_configs or {})}
    for label, config in every.items():
        console.print(f"memory: {label} alone in {nproc} fresh ranks", style="dim")
        try:
            alone[label] = run_task(
                replace(sizes.make_task({label: config}), rounds=1, steps=2, measure_memory=True), nproc, env
            )
        except WindlassError:
            if label in configs:
                raise
            failed.append(label)
    console.print(f"time: {', '.join(alone)} alternately, {sizes.rounds} rounds of {sizes.steps} steps", style="dim")
    together = run_task(sizes.make_task({label: every[label] for label in alone}), nproc, env)
    return {label: _make_measurement(label, together, ranks, sizes, nproc) for label, ranks in alone.items()}, failed


def _make_measurement(
    label: str, timed_ranks: list[dict[str, Any]], memory_ranks: list[dict[str, Any]], sizes: BenchSizes, nproc: int
) -> ConfigMeasurement:
    seconds = [max(step) for step in zip(*(rank["seconds"][label] for rank in timed_ranks), strict=True)]
    losses = [statistics.mean(step) for step in zip(*(rank["losses"][label] for rank in timed_ranks), strict=True)]
    memory = [rank["memory"] for rank in memory_ranks]
    return ConfigMeasurement(
        seconds=seconds,
        samples_per_second=nproc * sizes.batch / statistics.median(seconds),
        run_seconds=sum(seconds),
        peak_memory=max(memory),
        peak_memory_of_ranks=memory,
        memory_kind=memory_ranks[0]["memory_kind"],
        copied_bytes=max((rank["copied"][label] for rank in memory_ranks), key=lambda copied: sum(copied.values())),
        losses=losses,
        transport=timed_ranks[0]["transport"][label],
        parameters=timed_ranks[0]["parameters"],
    )


def report_bench(
    name: str, rows: dict[str, ConfigMeasurement], conclusions: list[str], nproc: int, sizes: BenchSizes, out: Path
) -> None:
    """Print the table and the conclusions; write the JSON file and the picture."""
    console = bench_console()
    console.print(_measurement_table(rows, nproc, sizes))
    for line in conclusions:
        console.print(line, soft_wrap=True)
    result = {
        "bench": name,
        "ranks": nproc,
        "sizes": vars(sizes),
        "rows": {label: vars(row) for label, row in rows.items()},
        "verdicts": conclusions,
    }
    written = write_result(out / f"{name}.json", result)
    memory = {label: row.peak_memory / row.parameters for label, row in rows.items()}
    panels = [
        BarPanel("speed", "samples / s", {label: row.samples_per_second for label, row in rows.items()}),
        BarPanel("peak memory of a rank", "bytes a parameter", memory),
        BarPanel("last loss", "nats a token", {label: row.losses[-1] for label, row in rows.items()}),
    ]
    drawn = draw_bars(panels, out / f"{name}.png", f"windlass bench {name}, {nproc} ranks")
    console.print(f"written: {written}{' and its .png' if drawn else ''}", soft_wrap=True)


def _measurement_table(rows: dict[str, ConfigMeasurement], nproc: int, sizes: BenchSizes) -> Table:
    first = next(row for row in rows.values() if row.transport != "none")
    title = (
        f"{first.parameters / 1e6:.1f}M parameters, {nproc} ranks x {sizes.batch} x {sizes.length} tokens, "
        f"transport {first.transport}; memory of the rank with the highest peak, {first.memory_kind}"
    )
    table = Table(title=title, title_justify="left")
    columns = ["", "samples/s", "ms/step", "spread", "run time s", "memory MiB", "bytes/param", "last loss"]
    copies = any(any(row.copied_bytes.values()) for row in rows.values())
    columns += ["copied MiB/step", "disk MiB/step"] if copies else []
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for label, row in rows.items():
        cells = [
            label,
            f"{row.samples_per_second:.2f}",
            f"{statistics.median(row.seconds) * 1e3:.1f}",
            f"{min(row.seconds) * 1e3:.0f}-{max(row.seconds) * 1e3:.0f}",
            f"{row.run_seconds:.1f}",
            f"{row.peak_memory / 2**20:,.0f}",
            f"{row.peak_memory / row.parameters:.1f}",
            f"{row.losses[-1]:.4f}",
        ]
        table.add_row(*cells, *(_format_copies(row) if copies else ()))
    return table


def _format_copies(row: ConfigMeasurement) -> tuple[str, str]:
    """Format the MiB copied between host and device, and between disk and host, each the sum of both directions."""
    if not row.copied_bytes:
        return "-", "-"
    across = row.copied_bytes["to_device"] + row.copied_bytes["to_host"]
    disk = row.copied_bytes["from_disk"] + row.copied_bytes["to_disk"]
    return f"{across / 2**20:,.0f}", f"{disk / 2**20:,.0f}"
