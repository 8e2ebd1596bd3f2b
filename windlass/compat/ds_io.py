"""Commands `ds_io`, which measures a disk with one setting, and `ds_nvme_tune`, which finds the fastest setting."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from windlass.base.bounded_json import parse_json
from windlass.base.broken_pipe import exit_quietly_on_broken_pipe
from windlass.base.byte_counts import parse_bytes
from windlass.base.errors import StorageError, WindlassError
from windlass.base.text import print_escaped
from windlass.launch.launch_flags import int_between
from windlass.storage.disk_processes import measure_processes
from windlass.storage.disk_sweep import (
    DEFAULT_SETTINGS,
    DiskMeasurement,
    DiskSetting,
    best_measurement,
    measure_setting,
    sweep,
)

_LOG_FILE = "windlass_disk_rates.json"
_MOST = 1 << 20  # upper bound of the numbers of processes, requests, threads and loops
_INERT = "accepted and ignored; windlass's I/O engine always overlaps requests, from aligned memory"


def parse_size(text: str, source: str) -> int:
    """Return the number of bytes in a text like `64M`, `1G` or `4096`.

    Raises:
        StorageError: the text is not a positive size. The message names `source`.
    """
    try:
        size = parse_bytes(text, "size")
    except WindlassError:
        size = 0
    if size < 1:
        raise StorageError(
            f"{source}: {text!r} is not a positive number; write one, such as 8, or for bytes 64M (K, M or G)"
        )
    return size


def build_io_parser() -> argparse.ArgumentParser:
    """Return the parser of `ds_io`."""
    parser = argparse.ArgumentParser("ds_io", description="Measure reads or writes of one setting of the aio section.")
    parser.add_argument("--folder", help="folder on the disk")
    parser.add_argument(
        "--folder_to_device_mapping", nargs="+", default=[], metavar="FOLDER:DEVICE", help="folders; one process each"
    )
    parser.add_argument("--io_size", required=True, help="bytes to move, with K, M or G")
    parser.add_argument("--read", action="store_true", help="read; else write")
    parser.add_argument(
        "--multi_process", type=int_between(1, _MOST), default=1, help="processes that work at once [1]"
    )
    parser.add_argument("--block_size", default="1M", help="bytes of a request [1M]")
    parser.add_argument("--queue_depth", type=int_between(1, _MOST), default=32, help="requests in flight [32]")
    parser.add_argument("--io_parallel", type=int_between(1, _MOST), help="threads, if the I/O engine uses threads [1]")
    parser.add_argument("--loops", type=int_between(1, _MOST), default=3, help="runs; the best counts [3]")
    parser.add_argument(
        "--validate", action="store_true", help="accepted and ignored; every page that is read is checked"
    )
    for flag in ("--single_submit", "--sequential_requests", "--slow_bounce_buffer", "--torch_legacy_save"):
        parser.add_argument(flag, action="store_true", help=_INERT)
    for flag in ("--use_accelerator_pin_memory", "--include_warmup_time", "--different_file_each_iteration"):
        parser.add_argument(flag, action="store_true", help=_INERT)
    parser.add_argument("--engine", default="aio_handle", help=_INERT)
    parser.add_argument("--fast_io_size", default="64M", help=_INERT)
    parser.add_argument(
        "--warmup_loops",
        type=int_between(0, _MOST),
        default=1,
        help="accepted and ignored; the file is written once before the timed runs",
    )
    parser.add_argument("--gpu", action="store_true", help="refused: only host memory is measured")
    parser.add_argument("--use_gds", action="store_true", help="refused: GPUDirect Storage is not built")
    return parser


@exit_quietly_on_broken_pipe()
def ds_io(argv: Sequence[str] | None = None) -> int:
    """Run `ds_io`. Return the exit code."""
    asked = build_io_parser().parse_args(argv)
    try:
        _refuse_device_memory("ds_io", gpu=asked.gpu, gds=asked.use_gds)
        setting = DiskSetting(parse_size(asked.block_size, "--block_size"), asked.queue_depth, asked.io_parallel or 1)
        folders = [Path(pair.rpartition(":")[0] or pair) for pair in asked.folder_to_device_mapping]
        if asked.folder:
            folders = [Path(asked.folder)] * asked.multi_process
        if not folders:
            raise StorageError("ds_io: no folder is given; write --folder FOLDER")
        nbytes = parse_size(asked.io_size, "--io_size")
        # one folder is measured in this process
        measure = measure_setting if len(folders) == 1 else measure_processes
        found = measure(setting, folders, nbytes, asked.loops)
    except WindlassError as error:
        print_escaped(f"ds_io: {error}", to_stderr=True)
        return 1
    kind = "read" if asked.read else "write"
    rate = found.read_rate if asked.read else found.write_rate
    print_escaped(f"engine: {found.engine}")
    print_escaped(
        f"{kind}: {rate / 1e9:.3f} GB/s of {asked.io_size}, processes {len(folders)}, block size {asked.block_size}, "
        f"queue depth {asked.queue_depth}"
    )
    return 0


def build_tune_parser() -> argparse.ArgumentParser:
    """Return the parser of `ds_nvme_tune`."""
    parser = argparse.ArgumentParser(
        "ds_nvme_tune", description="Measure settings of the aio section and print the fastest."
    )
    parser.add_argument("--nvme_dir", nargs="+", required=True, help="one or more folders, over which data is striped")
    parser.add_argument("--sweep_config", help="JSON with lists block_size, queue_depth and io_parallel")
    parser.add_argument("--no_read", action="store_true", help="choose by the speed of writes only")
    parser.add_argument("--no_write", action="store_true", help="choose by the speed of reads only")
    parser.add_argument("--io_size", default="400M", help="bytes to move with each setting [400M]")
    parser.add_argument("--gpu", action="store_true", help="refused: only host memory is measured")
    parser.add_argument("--gds", action="store_true", help="refused: GPUDirect Storage is not built")
    parser.add_argument(
        "--flush_page_cache", action="store_true", help="accepted and ignored; direct I/O bypasses the page cache"
    )
    parser.add_argument("--log_dir", default="_aio_bench_logs", help="folder of the measured rates [_aio_bench_logs]")
    parser.add_argument("--loops", type=int_between(1, _MOST), default=1, help="passes; the best counts [1]")
    parser.add_argument("--verbose", action="store_true", help="print every setting")
    return parser


@exit_quietly_on_broken_pipe()
def ds_nvme_tune(argv: Sequence[str] | None = None) -> int:
    """Run `ds_nvme_tune`. Return the exit code."""
    asked = build_tune_parser().parse_args(argv)
    read, write = not asked.no_read, not asked.no_write
    try:
        _refuse_device_memory("ds_nvme_tune", gpu=asked.gpu, gds=asked.gds)
        if not (read or write):
            raise StorageError("ds_nvme_tune: --no_read and --no_write leave nothing to measure; drop one of them")
        settings = read_sweep(Path(asked.sweep_config)) if asked.sweep_config else list(DEFAULT_SETTINGS)
        log = Path(asked.log_dir) / _LOG_FILE
        log.parent.mkdir(parents=True, exist_ok=True)  # here, so that an error comes before the long sweep
        found = sweep(
            settings,
            [Path(folder) for folder in asked.nvme_dir],
            parse_size(asked.io_size, "--io_size"),
            loops=asked.loops,
            on_measured=(lambda one: print_escaped(describe_measurement(one))) if asked.verbose else None,
        )
        best = best_measurement(found, read=read, write=write)
        log.write_text(json.dumps([measurement_as_data(one) for one in found], indent=1) + "\n", "utf-8")
    except (WindlassError, OSError) as error:
        print_escaped(f"ds_nvme_tune: {error}", to_stderr=True)
        return 1
    print_escaped(
        f"Best performance (GB/sec): read = {best.read_rate / 1e9:5.2f}, write = {best.write_rate / 1e9:5.2f}"
    )
    print_escaped(json.dumps(best.setting.as_section(), indent=3))
    return 0


def read_sweep(path: Path) -> list[DiskSetting]:
    """Read the settings of a sweep: every combination of the lists in a JSON file.

    Keys that have no effect here, such as `single_submit`, are ignored.

    Raises:
        StorageError: the file cannot be read, or a value is not a size or number.
    """
    try:
        given = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError, WindlassError) as error:
        raise StorageError(f"--sweep_config {path}: {error}; give a JSON object with lists of values") from error
    if not isinstance(given, dict):
        raise StorageError(f'--sweep_config {path}: the file holds no object; write {{"block_size": ["1M"], ...}}')
    lists = [
        list(_sweep_values(given, path, ("block_size",), 1 << 20)),
        list(_sweep_values(given, path, ("queue_depth",), 32)),
        list(_sweep_values(given, path, ("io_parallel", "intra_op_parallelism"), 1)),
    ]
    return list(dict.fromkeys(DiskSetting(*values) for values in product(*lists)))


def _sweep_values(given: dict[str, Any], path: Path, keys: Sequence[str], default: int) -> Iterator[int]:
    values = next((given[key] for key in keys if key in given), default)
    for value in values if isinstance(values, list) else [values]:
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise StorageError(
                f"--sweep_config {path}: {keys[0]} has {value!r}; write positive numbers or sizes like 1M"
            )
        yield parse_size(str(value), f"--sweep_config {path}: {keys[0]}")


def describe_measurement(found: DiskMeasurement) -> str:
    """Return one line with a setting and its rates."""
    one = found.setting
    return (
        f"block {one.block_size / 2**20:g} MiB, depth {one.queue_depth}, threads {one.intra_op_parallelism}: "
        f"read {found.read_rate / 1e9:.2f} GB/s, write {found.write_rate / 1e9:.2f} GB/s"
    )


def measurement_as_data(found: DiskMeasurement) -> dict[str, Any]:
    """Return a setting and its rates in bytes per second as plain data."""
    return {
        **found.setting.as_section()["aio"],
        "read_bytes_per_second": round(found.read_rate),
        "write_bytes_per_second": round(found.write_rate),
        "engine": found.engine,
    }


def _refuse_device_memory(command: str, *, gpu: bool, gds: bool) -> None:
    if gpu or gds:
        flag = "--gpu" if gpu else "GPUDirect Storage"
        raise StorageError(
            f"{command}: {flag} is not built; measure host memory, through which offloaded tensors pass: drop the flag"
        )


def io_main() -> None:
    """Run `ds_io` and exit with its code. Same as `deepspeed.nvme.ds_io_main`."""
    sys.exit(ds_io())


def tune_main() -> None:
    """Run `ds_nvme_tune` and exit with its code."""
    sys.exit(ds_nvme_tune())
