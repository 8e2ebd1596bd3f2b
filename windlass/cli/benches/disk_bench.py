"""Experiment of `windlass bench disk`: rates of a disk with several values of the `aio` section, and the best ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from rich.table import Table

from windlass.base.atomic_file import write_atomically
from windlass.base.errors import StorageError
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.cli.benches.measured_cluster import CLUSTER_FILE, set_measured
from windlass.compat.ds_io import measurement_as_data, parse_size
from windlass.storage.disk_sweep import DiskMeasurement, DiskSetting, best_measurement, sweep


def parse_settings(block_sizes: str, queue_depths: str, threads: str) -> list[DiskSetting]:
    """Return every combination of the values of three comma-separated lists.

    Raises:
        StorageError: a value is not a positive number or size.
    """
    given = {"--block-sizes": block_sizes, "--queue-depths": queue_depths, "--threads": threads}
    lists = [[parse_size(word, option) for word in text.split(",")] for option, text in given.items()]
    return [DiskSetting(*values) for values in product(*lists)]


def run_disk_bench(
    folders: Sequence[Path], settings: Sequence[DiskSetting], nbytes: int, rounds: int, out: Path
) -> None:
    """Measure the disks with each setting, print the rates and the best `aio` section, write `disk.json` and
    `aio.json` to `out`, and set the rates of the disks in `cluster.toml` there.

    Raises:
        StorageError: there is no folder, or one is missing, not writable or too full.
    """
    if not folders:
        raise StorageError("there is no folder to measure; write --folder FOLDER, once for each disk")
    console = bench_console()
    console.print(f"{len(settings)} settings x {rounds} rounds x 3 x {nbytes / 2**20:g} MiB", style="dim")
    found = sweep(settings, folders, nbytes, loops=rounds)
    best = best_measurement(found)
    console.print(_result_table(found, best))
    console.print(f"engine: {best.engine}", soft_wrap=True)
    section = best.setting.as_section()
    console.print(json.dumps(section), soft_wrap=True)
    data = {
        "bench": "disk",
        "measured_bytes": nbytes,
        "rounds": rounds,
        "rows": [measurement_as_data(one) for one in found],
    }
    written = write_result(out / "disk.json", {**data, "best": section})
    write_atomically(out / "aio.json", json.dumps(section, indent=1) + "\n")
    rates = {"disk_read": best.read_rate, "disk_write": best.write_rate}
    set_measured(out / CLUSTER_FILE, "host", {key: f"{rate / 1e9:.6g}GB/s" for key, rate in rates.items()})
    console.print(
        f"written: {written}, {out / 'aio.json'}, the section for a configuration, and \\[host] of "
        f"{out / CLUSTER_FILE}, for windlass simulate",
        soft_wrap=True,
    )


def _result_table(found: Sequence[DiskMeasurement], best: DiskMeasurement) -> Table:
    table = Table(title="rates of the disk tier; the best round of each direction", title_justify="left")
    for column in ("block MiB", "queue depth", "threads", "read GB/s", "write GB/s", ""):
        table.add_column(column, justify="right")
    for one in found:
        setting = one.setting
        table.add_row(
            f"{setting.block_size / 2**20:g}",
            str(setting.queue_depth),
            str(setting.intra_op_parallelism),
            f"{one.read_rate / 1e9:.2f}",
            f"{one.write_rate / 1e9:.2f}",
            "best" if one is best else "",
        )
    return table
