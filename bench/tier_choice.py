"""Step time of `"offload": "auto"` compared with the best setting by hand that fits into the same memory.

python bench/tier_choice.py --path /mnt/nvme

Device memory is emulated: allocated bytes are counted, and copies to and from host memory are real. Each manual setting
gives one limit: its peak memory plus 10 %. Each pair of neighbouring settings gives another: device memory half way
between the two, and enough host memory for the next setting, or half way if the next one needs less.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.table import Table
from rig.job import Size
from rig.tiered_rank import TieredJob, start_tiered_ranks

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.cli.benches.rank_pool import RankPool

_RESULTS = Path(__file__).parent / "results"
AT_MOST, BETWEEN = 1.0, 1 / 1.2
"""Largest ratio of the step to that of the best setting by hand, for a limit from one setting and between two."""
_NOISE = 0.03  # relative difference of medians that counts as noise
_LOSS_TOLERANCE = 1e-5
_RESERVE = 0.1  # part of a setting's bytes that its limit allows in addition
_FEW_BUFFERS = {"device": "nvme", "buffer_count": 4}
HAND: dict[str, dict[str, Any]] = {
    "all on the device": {},
    "optimizer on the host": {"offload_optimizer": {"device": "cpu"}},
    "all on the host": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "optimizer on disk": {"offload_optimizer": _FEW_BUFFERS, "sub_group_size": 500_000},
    "all on disk": {
        "offload_optimizer": _FEW_BUFFERS,
        "offload_param": {"device": "nvme"},
        "sub_group_size": 500_000,
    },
}
"""Sections of settings by hand, in the order of the memory that they need: first less on the device, then less on the
host. The settings on disk have few and small buffers, because default buffers take more host memory than the states."""


@dataclass(frozen=True)
class Need:
    """Bytes of a rank."""

    device: int
    host: int

    def fits(self, limit: Need) -> bool:
        """Return True if both are within `limit`."""
        return self.device <= limit.device and self.host <= limit.host


def main(
    hidden: Annotated[int, typer.Option(min=64, help="Width of the Llama, a multiple of 64.")] = 512,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the Llama.")] = 8,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a sequence.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Sequences on a rank.")] = 1,
    ranks: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each setting is timed, in turn.")] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed at once.")] = 3,
    path: Annotated[Path, typer.Option(help="A folder on the disk to use.")] = Path("."),
    name: Annotated[str, typer.Option(help="Name of the file in --results.")] = "tier_choice",
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = _RESULTS,
) -> None:
    """Measure the settings by hand, then the chosen tiers under each limit, alternately with those by hand. The
    exit code is 1 if a target is missed or losses differ."""
    console, size = bench_console(), Size(hidden, layers, length, batch, 4096)
    rows: list[Row] = []
    with TemporaryDirectory(prefix="windlass-tiers-", dir=path) as folder, ExitStack() as pools:
        hands = {}
        for label, chosen in HAND.items():
            console.print(f"first steps of {label}", style="dim")
            config = _config(batch, _by_hand(chosen, folder))
            hands[label] = pools.enter_context(start_tiered_ranks(TieredJob(label, config, size), ranks))
        needs = {label: _need_of(pool) for label, pool in hands.items()}
        for label, limit in limits_of(needs).items():
            console.print(f"{rounds} rounds of {steps} steps within {label}", style="dim")
            config = _config(batch, {}, _chosen(limit, folder))
            with start_tiered_ranks(TieredJob(label, config, size), ranks) as auto:
                rows.append(compared(label, limit, auto, hands, needs, rounds, steps))
        parameters = next(iter(hands.values())).ask("tiers")[0]["parameters"]
    console.print(_table(rows, parameters, ranks))
    result = {"bench": "tier_choice", "ranks": ranks, "sizes": asdict(size), "parameters": parameters}
    result |= {"needs": {label: asdict(need) for label, need in needs.items()}}
    result |= {"rows": [asdict(row) | {"ratio": row.ratio, "meets": row.meets} for row in rows]}
    console.print(f"written: {write_result(results / f'{name}.json', result)}", soft_wrap=True)
    if not all(row.meets for row in rows):
        raise typer.Exit(1)


@dataclass(frozen=True)
class Row:
    """Chosen tiers within one limit, compared with the best setting by hand that fits.

    Attributes:
        used: Peak bytes of the chosen tiers.
        best: The fastest of the settings by hand that fit.
        seconds: Median step of each setting; of the chosen tiers by the label "auto".
        target: Largest allowed `ratio`. Between two settings, it is at least the ratio of the fastest setting by hand,
            even if that does not fit, because nothing can be faster.
    """

    limit: str
    allowed: Need
    used: Need
    best: str
    seconds: dict[str, float]
    target: float

    @property
    def ratio(self) -> float:
        """Step time of the chosen tiers divided by that of the best setting by hand."""
        return self.seconds["auto"] / self.seconds[self.best]

    @property
    def meets(self) -> bool:
        """True if the ratio is within the target, and the bytes are within the limit."""
        return self.ratio <= self.target * (1 + _NOISE) and self.used.fits(self.allowed)


def _need_of(pool: RankPool) -> Need:
    pool.ask("train", steps=2)
    of_ranks = pool.ask("tiers")
    return Need(max(one["device"] for one in of_ranks), max(one["host"] for one in of_ranks))


def compared(
    label: str,
    limit: Need,
    auto: RankPool,
    hands: Mapping[str, RankPool],
    needs: Mapping[str, Need],
    rounds: int,
    steps: int,
) -> Row:
    """Time the chosen tiers and all settings by hand alternately.

    Raises:
        RuntimeError: losses of the second step differ.
    """
    used, pools = _need_of(auto), {"auto": auto, **hands}
    times: dict[str, list[float]] = {name: [] for name in pools}
    for _ in range(rounds):
        for name, pool in pools.items():
            answers = pool.ask("train", steps=steps)
            times[name] += [max(step) for step in zip(*(one["seconds"] for one in answers), strict=True)]
    second = {name: statistics.mean(one["second_loss"] for one in pool.ask("tiers")) for name, pool in pools.items()}
    apart = max(second.values()) - min(second.values())
    if any(map(math.isnan, second.values())) or apart > _LOSS_TOLERANCE:
        raise RuntimeError(f"{label}: the losses of the second step differ by {apart:.1e}: {second}")
    seconds = {name: statistics.median(each) for name, each in times.items()}
    best = min((name for name in hands if needs[name].fits(limit)), key=lambda name: seconds[name])
    target = AT_MOST
    if label.startswith("less than "):
        target = max(BETWEEN, min(seconds[name] for name in hands) / seconds[best])
    return Row(label, limit, used, best, seconds, target)


def limits_of(needs: Mapping[str, Need]) -> dict[str, Need]:
    """Return the limits by label: the need of each setting by hand with a reserve, and the middle of each
    two neighbours."""
    more = 1 + _RESERVE
    wide = {label: Need(int(need.device * more), int(need.host * more)) for label, need in needs.items()}
    found = {}
    for (label, one), (_, following) in pairwise(wide.items()):
        found[f"as {label}"] = one
        # The next setting takes less device memory and more host memory, or less host memory.
        host = following.host if following.host > one.host else (one.host + following.host) // 2
        found[f"less than {label}"] = Need((one.device + following.device) // 2, host)
    last = list(wide)[-1]
    return {**found, f"as {last}": wide[last]}


def _config(batch: int, zero: dict[str, Any], offload: dict[str, Any] | None = None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    return config if offload is None else {**config, "offload": offload}


def _by_hand(chosen: Mapping[str, Any], folder: str) -> dict[str, Any]:
    def with_path(section: Any) -> Any:
        on_disk = isinstance(section, dict) and section["device"] == "nvme"
        return {**section, "nvme_path": folder} if on_disk else section

    return {name: with_path(section) for name, section in chosen.items()}


def _chosen(limit: Need, folder: str) -> dict[str, Any]:
    return {"nvme_path": folder, "device_memory": limit.device, "host_memory": max(1, limit.host)}


def _table(rows: list[Row], parameters: int, ranks: int) -> Table:
    title = f"{parameters / 1e6:.1f}M parameters, {ranks} ranks, stage 3; MiB and ms of a rank's step"
    table = Table(title=title, title_justify="left")
    for column in ("limit", "device", "used", "host", "auto", "best by hand that fits", "it", "ratio", "target", ""):
        table.add_column(column, justify="left" if column in ("limit", "best by hand that fits") else "right")
    for row in rows:
        table.add_row(
            row.limit,
            *(f"{each / 2**20:,.0f}" for each in (row.allowed.device, row.used.device, row.allowed.host)),
            *(f"{row.seconds['auto'] * 1e3:,.0f}", row.best, f"{row.seconds[row.best] * 1e3:,.0f}"),
            *(f"{row.ratio:.2f}", f"{row.target:.2f}", "" if row.meets else "MISS"),
        )
    return table


if __name__ == "__main__":
    typer.run(main)
