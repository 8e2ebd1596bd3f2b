"""`windlass bench stages` and `precision`: one model under several configurations; time in turns, memory each alone."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from windlass.base.errors import WindlassError
from windlass.cli.benches.facts import write_result
from windlass.cli.benches.picture import Panel, draw
from windlass.cli.benches.ranks import measure
from windlass.cli.benches.screen import screen
from windlass.cli.benches.verdicts import verdict
from windlass.cli.benches.work import TrainingWork

STAGES = ("stage 0", "stage 1", "stage 2", "stage 3")
PRECISIONS = ("fp32", "bf16", "fp16")
_NOISE, _MEMORY_NOISE = 0.05, 0.03
EQUAL_LOSS = 1e-5


@dataclass(frozen=True)
class Sizes:
    """Of the model and of the experiment; see `TrainingWork`."""

    hidden: int
    layers: int
    length: int
    batch: int
    rounds: int
    steps: int
    vocabulary: int = 4096

    def work(self, configs: dict[str, dict[str, Any]]) -> TrainingWork:
        """All configurations in turns, memory not watched."""
        return TrainingWork(
            configs, self.vocabulary, self.hidden, self.layers, self.length, self.batch, self.rounds, self.steps, False
        )


@dataclass(frozen=True)
class Row:
    """What one configuration came to.

    Attributes:
        seconds: of a step, on its slowest rank.
        memory, memory_of_ranks: bytes at most, of the rank that took most, and of each.
        memory_kind: how they were counted.
        copied: bytes that a rank copied in a step, by where to; empty if the engine does not tell.
    """

    seconds: list[float]
    samples_per_second: float
    run_seconds: float
    memory: int
    memory_of_ranks: list[int]
    memory_kind: str
    copied: dict[str, int]
    losses: list[float]
    transport: str
    parameters: int


def stages(nproc: int, sizes: Sizes, out: Path) -> bool:
    """Compare the stages; prints the order in speed and in memory beside the one in tutorials.

    Returns:
        Whether all stages had the same losses.
    """
    rows, _ = measured({f"stage {stage}": plain_config(sizes, stage=stage) for stage in range(4)}, sizes, nproc)
    reference = rows["stage 0"].losses
    apart = max(abs(a - b) for row in rows.values() for a, b in zip(row.losses, reference, strict=True))
    times = {label: statistics.median(row.seconds) * 1e3 for label, row in rows.items()}
    memory = {label: row.memory / row.parameters for label, row in rows.items()}
    verdicts = [
        f"losses: {'equal' if apart <= EQUAL_LOSS else 'NOT equal'}; the furthest two are {apart:.1e} apart",
        verdict("speed (ms a step)", times, STAGES, _NOISE),
        verdict("memory (bytes a parameter)", memory, tuple(reversed(STAGES)), _MEMORY_NOISE),
    ]
    tell("stages", rows, verdicts, nproc, sizes, out)
    return apart <= EQUAL_LOSS


def precision(nproc: int, sizes: Sizes, stage: int, out: Path) -> bool:
    """Compare fp32, bf16 and fp16 at one stage.

    Returns:
        Whether every loss fell and is finite.
    """
    configs = {"fp32": plain_config(sizes, stage=stage)}
    for name in PRECISIONS[1:]:
        configs[name] = {**plain_config(sizes, stage=stage), name: {"enabled": True}}
    configs["fp16"]["fp16"]["initial_scale_power"] = 12  # starts where it does not overflow, so that all steps count
    rows, _ = measured(configs, sizes, nproc)
    learned = {label: row.losses[-1] < row.losses[0] for label, row in rows.items()}
    full = rows["fp32"].losses[-1]
    verdicts = [
        f"{label}: loss {row.losses[0]:.4f} -> {row.losses[-1]:.4f} ({row.losses[-1] - full:+.4f} against fp32), "
        f"{statistics.median(row.seconds) / statistics.median(rows['fp32'].seconds):.2f} x the time and "
        f"{row.memory / rows['fp32'].memory:.2f} x the memory of fp32{'' if learned[label] else '; did NOT learn'}"
        for label, row in rows.items()
    ]
    tell("precision", rows, verdicts, nproc, sizes, out)
    return all(learned.values())


def plain_config(sizes: Sizes, *, stage: int) -> dict[str, Any]:
    """AdamW at a stage, and nothing else."""
    return {
        "train_micro_batch_size_per_gpu": sizes.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }


def measured(
    configs: dict[str, dict[str, Any]],
    sizes: Sizes,
    nproc: int,
    env: dict[str, str] | None = None,
    rivals: dict[str, dict[str, Any]] | None = None,
) -> tuple[dict[str, Row], list[str]]:
    """Measure the memory of each configuration alone, then time all in turns.

    Args:
        configs: by label; see `TrainingWork`.
        env: more of the environment of the ranks.
        rivals: more configurations, of engines that may fail here.

    Returns:
        Rows by label, and the labels of rivals that failed.
    """
    console = screen()
    alone: dict[str, list[dict[str, Any]]] = {}
    failed = []
    every = {**configs, **(rivals or {})}
    for label, config in every.items():
        console.print(f"memory: {label} alone in {nproc} fresh ranks", style="dim")
        try:
            alone[label] = measure(replace(sizes.work({label: config}), rounds=1, steps=2, watch=True), nproc, env)
        except WindlassError:
            if label in configs:
                raise
            failed.append(label)
    console.print(f"time: {', '.join(alone)} in turns, {sizes.rounds} rounds of {sizes.steps} steps", style="dim")
    together = measure(sizes.work({label: every[label] for label in alone}), nproc, env)
    return {label: _row(label, together, ranks, sizes, nproc) for label, ranks in alone.items()}, failed


def _row(label: str, together: list[dict[str, Any]], alone: list[dict[str, Any]], sizes: Sizes, nproc: int) -> Row:
    seconds = [max(step) for step in zip(*(rank["seconds"][label] for rank in together), strict=True)]
    losses = [statistics.mean(step) for step in zip(*(rank["losses"][label] for rank in together), strict=True)]
    memory = [rank["memory"] for rank in alone]
    return Row(
        seconds=seconds,
        samples_per_second=nproc * sizes.batch / statistics.median(seconds),
        run_seconds=sum(seconds),
        memory=max(memory),
        memory_of_ranks=memory,
        memory_kind=alone[0]["memory_kind"],
        copied=max((rank["copied"][label] for rank in alone), key=lambda copied: sum(copied.values())),
        losses=losses,
        transport=together[0]["transport"][label],
        parameters=together[0]["parameters"],
    )


def tell(name: str, rows: dict[str, Row], verdicts: list[str], nproc: int, sizes: Sizes, out: Path) -> None:
    """Print the table and the verdicts; write JSON and picture."""
    console = screen()
    console.print(_table(rows, nproc, sizes))
    for line in verdicts:
        console.print(line, soft_wrap=True)
    result = {
        "bench": name,
        "ranks": nproc,
        "sizes": vars(sizes),
        "rows": {label: vars(row) for label, row in rows.items()},
        "verdicts": verdicts,
    }
    written = write_result(out / f"{name}.json", result)
    memory = {label: row.memory / row.parameters for label, row in rows.items()}
    panels = [
        Panel("speed", "samples / s", {label: row.samples_per_second for label, row in rows.items()}),
        Panel("peak memory of a rank", "bytes a parameter", memory),
        Panel("last loss", "nats a token", {label: row.losses[-1] for label, row in rows.items()}),
    ]
    drawn = draw(panels, out / f"{name}.png", f"windlass bench {name}, {nproc} ranks")
    console.print(f"written: {written}{' and its .png' if drawn else ''}", soft_wrap=True)


def _table(rows: dict[str, Row], nproc: int, sizes: Sizes) -> Table:
    first = next(row for row in rows.values() if row.transport != "none")
    title = (
        f"{first.parameters / 1e6:.1f}M parameters, {nproc} ranks x {sizes.batch} x {sizes.length} tokens, "
        f"transport {first.transport}; memory of the rank that takes most, {first.memory_kind}"
    )
    table = Table(title=title, title_justify="left")
    columns = ["", "samples/s", "ms/step", "spread", "run time s", "memory MiB", "bytes/param", "last loss"]
    copies = any(any(row.copied.values()) for row in rows.values())
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
            f"{row.memory / 2**20:,.0f}",
            f"{row.memory / row.parameters:.1f}",
            f"{row.losses[-1]:.4f}",
        ]
        table.add_row(*cells, *(_copies(row) if copies else ()))
    return table


def _copies(row: Row) -> tuple[str, str]:
    """Between host and device, and between disk and host, both ways together."""
    if not row.copied:
        return "-", "-"
    across = row.copied["to_device"] + row.copied["to_host"]
    disk = row.copied["from_disk"] + row.copied["to_disk"]
    return f"{across / 2**20:,.0f}", f"{disk / 2**20:,.0f}"
