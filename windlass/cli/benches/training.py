"""`windlass bench stages` and `precision`: one model under several configurations; time in turns, memory each alone."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

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
    """What one configuration came to. `seconds` of a step are those of its slowest rank."""

    seconds: list[float]
    samples_per_second: float
    run_seconds: float
    memory: int
    losses: list[float]
    transport: str
    parameters: int


def stages(nproc: int, sizes: Sizes, out: Path) -> bool:
    """Compare the stages; prints the order in speed and in memory beside the one in tutorials.

    Returns:
        Whether all stages had the same losses.
    """
    rows = measured({f"stage {stage}": plain_config(sizes, stage=stage) for stage in range(4)}, sizes, nproc)
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
    rows = measured(configs, sizes, nproc)
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
        "steps_per_print": 10**9,
    }


def measured(
    configs: dict[str, dict[str, Any]], sizes: Sizes, nproc: int, env: dict[str, str] | None = None
) -> dict[str, Row]:
    """Time all configurations in turns, then the memory of each alone.

    Args:
        configs: by label; `{"engine": "none"}` is the compute alone.
        env: more of the environment of the ranks.
    """
    console = screen()
    console.print(f"time: {', '.join(configs)} in turns, {sizes.rounds} rounds of {sizes.steps} steps", style="dim")
    together = measure(sizes.work(configs), nproc, env)
    rows = {}
    for label, config in configs.items():
        console.print(f"memory: {label} alone in {nproc} fresh ranks", style="dim")
        alone = measure(replace(sizes.work({label: config}), rounds=1, steps=2, watch=True), nproc, env)
        rows[label] = _row(label, together, alone, sizes, nproc)
    return rows


def _row(label: str, together: list[dict[str, Any]], alone: list[dict[str, Any]], sizes: Sizes, nproc: int) -> Row:
    seconds = [max(step) for step in zip(*(rank["seconds"][label] for rank in together), strict=True)]
    losses = [statistics.mean(step) for step in zip(*(rank["losses"][label] for rank in together), strict=True)]
    return Row(
        seconds=seconds,
        samples_per_second=nproc * sizes.batch / statistics.median(seconds),
        run_seconds=sum(seconds),
        memory=max(rank["memory"] for rank in alone),
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
    first = list(rows.values())[-1]
    title = (
        f"{first.parameters / 1e6:.1f}M parameters, {nproc} ranks x {sizes.batch} x {sizes.length} tokens, "
        f"transport {first.transport}"
    )
    table = Table(title=title, title_justify="left")
    for column in ("", "samples/s", "ms/step", "spread", "run time s", "memory MiB", "bytes/param", "last loss"):
        table.add_column(column, justify="right" if column else "left")
    for label, row in rows.items():
        table.add_row(
            label,
            f"{row.samples_per_second:.2f}",
            f"{statistics.median(row.seconds) * 1e3:.1f}",
            f"{min(row.seconds) * 1e3:.0f}-{max(row.seconds) * 1e3:.0f}",
            f"{row.run_seconds:.1f}",
            f"{row.memory / 2**20:,.0f}",
            f"{row.memory / row.parameters:.1f}",
            f"{row.losses[-1]:.4f}",
        )
    return table
