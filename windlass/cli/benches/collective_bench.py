"""Experiment of `windlass bench transport --collectives`: latency and bandwidth of collectives between fresh ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.table import Table

from windlass.base.byte_counts import parse_bytes
from windlass.base.dtypes import parse_dtype
from windlass.base.errors import CommunicationError
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.cli.benches.line_chart import LinePanel, draw_lines
from windlass.cli.benches.measured_cluster import CLUSTER_FILE, link_values, measured_device_link, set_measured
from windlass.cli.benches.rank_pool import RankPool
from windlass.comm.bootstrap import init_distributed
from windlass.compat.collective_benchmark import OPERATIONS, CollectiveSettings, measure_collectives
from windlass.launch.start_ranks import threads_per_rank


class CollectiveWorker:
    """Worker of a `RankPool` that measures collectives. The constructor is collective."""

    def __init__(self, settings: CollectiveSettings, rank: int, init_method: str) -> None:
        self._settings = settings
        init_distributed(init_method=init_method)

    def run(self) -> dict[str, Any]:
        """Measure all settings. Return the backend and this rank's rows, as plain data."""
        return {
            "backend": dist.get_backend(),
            "rows": [asdict(row) for row in measure_collectives(self._settings)],
        }


def parse_settings(operations: str, sizes: str, dtypes: str, trials: int, nproc: int) -> CollectiveSettings:
    """Parse comma-separated lists. `all` stands for the operations that `nproc` ranks can run.

    Raises:
        CommunicationError: an operation is unknown, or a size is 0.
        ConfigError: a size or a dtype cannot be parsed.
    """
    chosen = [word.strip() for word in operations.split(",")]
    if chosen == ["all"]:
        chosen = [name for name in OPERATIONS if nproc > 1 or name != "pt2pt"]
    if unknown := [name for name in chosen if name not in OPERATIONS]:
        raise CommunicationError(
            f"--collectives: {unknown[0]!r} is not an operation; write all, or some of {', '.join(OPERATIONS)}"
        )
    found = [parse_bytes(word, "--sizes") for word in sizes.split(",")]
    if min(found) < 1:
        raise CommunicationError(f"--sizes {sizes}: a message has at least one byte; write positive sizes, as 1K,1M")
    return CollectiveSettings(
        tuple(chosen), tuple(found), tuple(parse_dtype(word.strip()) for word in dtypes.split(",")), trials=trials
    )


def run_collective_bench(settings: CollectiveSettings, nproc: int, out: Path) -> None:
    """Measure collectives on newly started ranks, print a table, write a JSON file and a picture, and set the link of
    the ranks in `cluster.toml`."""
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(nproc)))}
    env["WINDLASS_LOG_LEVEL"] = "WARNING"
    with RankPool(partial(CollectiveWorker, settings), nproc, label="the measurement of collectives", env=env) as ranks:
        answers = ranks.ask("run")
    rows = _slowest_rows([answer["rows"] for answer in answers])
    console = bench_console()
    console.print(_result_table(rows, nproc, answers[0]["backend"]))
    result = {"bench": "collectives", "ranks": nproc, "backend": answers[0]["backend"], "rows": rows}
    written = write_result(out / "collectives.json", result)
    drawn = draw_lines(_panels(rows), out / "collectives.png", f"windlass bench transport --collectives, {nproc} ranks")
    shown = f"written: {written}{' and its .png' if drawn else ''}"
    if (link := measured_device_link(rows, nproc)) is not None:
        values = link_values(link)
        set_measured(out / CLUSTER_FILE, "host", {"devices": nproc, "device_link": values})
        shown += (
            f"; \\[host] of {out / CLUSTER_FILE}, for windlass simulate, has the link of a rank: "
            f"{values['rate']} after {values['latency']}"
        )
    console.print(shown, soft_wrap=True)


def _slowest_rows(by_rank: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return for each measurement the row of the rank on which it took longest."""
    return [max(rows, key=lambda row: row["seconds"]) for rows in zip(*by_rank, strict=True)]


def _result_table(rows: Sequence[dict[str, Any]], nproc: int, backend: str) -> Table:
    table = Table(title=f"collectives over {backend}, {nproc} ranks; median on the slowest rank", title_justify="left")
    for column in ("operation", "dtype", "bytes", "us", "algorithm Gbit/s", "bus Gbit/s"):
        table.add_column(column, justify="left" if column in ("operation", "dtype") else "right")
    for row in rows:
        table.add_row(
            row["operation"],
            row["dtype"],
            f"{row['nbytes']:,}",
            f"{row['seconds'] * 1e6:.1f}",
            f"{row['algorithm_gbps']:.3f}",
            f"{row['bus_gbps']:.3f}",
        )
    return table


def _panels(rows: Sequence[dict[str, Any]]) -> list[LinePanel]:
    """Return a panel of bus bandwidth for each dtype, with a line for each operation."""
    panels = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        lines: dict[str, list[float]] = {}
        sizes: dict[int, None] = {}
        for row in rows:
            if row["dtype"] == dtype:
                lines.setdefault(row["operation"], []).append(row["bus_gbps"])
                sizes[row["nbytes"]] = None
        panels.append(LinePanel(dtype, "bus Gbit/s", "bytes of a message", list(sizes), lines))
    return panels
