"""Tests of the commands ds_io, ds_nvme_tune, ds_bench, ds_elastic and ds_ssh."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from windlass.base.errors import CommunicationError, StorageError
from windlass.cli.benches.collective_bench import parse_settings as parse_collective_settings
from windlass.cli.benches.disk_bench import parse_settings as parse_disk_settings
from windlass.compat import ds_io as ds_io_module
from windlass.compat import ds_ssh as ssh_module
from windlass.compat.ds_bench import ds_bench
from windlass.compat.ds_elastic import ds_elastic
from windlass.compat.ds_io import ds_io, ds_nvme_tune, parse_size, read_sweep
from windlass.compat.ds_ssh import ds_ssh
from windlass.config import load_config
from windlass.config.elastic_batch import find_elastic_batch
from windlass.storage.disk_processes import ProcessRuns, TimedTransfer, combine_runs, measure_one
from windlass.storage.disk_sweep import DiskMeasurement, DiskSetting, best_measurement, sweep


def test_sizes() -> None:
    texts = ("4096", "64K", "1M", "2G", "1MB")
    assert [parse_size(text, "--size") for text in texts] == [4096, 65536, 1 << 20, 2 << 30, 1 << 20]
    for text in ("", "0", "-1", "M", "1X"):
        with pytest.raises(StorageError, match=f"--size: '{text}' is not a positive number"):
            parse_size(text, "--size")


def test_score_counts_the_time_of_both_directions() -> None:
    def rates(read: float, write: float, depth: int = 32) -> DiskMeasurement:
        return DiskMeasurement(DiskSetting(queue_depth=depth), read, write, "io_uring")

    assert rates(4.0, 2.0).score() == pytest.approx(2 / (1 / 4 + 1 / 2))
    assert rates(4.0, 2.0).score(write=False) == 4.0 and rates(4.0, 0.0).score() == 0.0
    fast, near, reader = rates(2.0, 2.0, 64), rates(1.97, 1.97, 4), rates(9.0, 0.5)
    assert best_measurement([fast, near, reader]) is near  # as fast within 2 %, with fewer bytes in flight
    assert best_measurement([fast, near, reader], write=False) is reader
    with pytest.raises(StorageError, match="no setting"):
        best_measurement([])


def test_sweep_measures_each_setting_in_every_round(tmp_path: Path) -> None:
    settings, seen = [DiskSetting(4096, 2), DiskSetting(8192, 4, 2)], list[DiskSetting]()
    found = sweep(settings, [tmp_path], 1 << 16, loops=2, on_measured=lambda one: seen.append(one.setting))
    assert [one.setting for one in found] == settings and sorted(seen, key=str) == sorted(settings, key=str)
    assert all(one.read_rate > 0 and one.write_rate > 0 for one in found)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match="is not a directory"):
        sweep(settings, [tmp_path / "missing"], 4096)


def test_sweep_alternates_its_order_and_keeps_the_best_of_each_direction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = DiskSetting(4096, 2), DiskSetting(8192, 4)
    rates = iter([(4.0, 1.0), (9.0, 9.0), (8.0, 5.0), (3.0, 2.0)])
    order: list[DiskSetting] = []

    def measure(setting: DiskSetting, folders: Sequence[Path], nbytes: int) -> DiskMeasurement:
        order.append(setting)
        return DiskMeasurement(setting, *next(rates), "io_uring")

    monkeypatch.setattr("windlass.storage.disk_sweep.measure_setting", measure)
    found = sweep([first, second], [tmp_path], 1 << 16, loops=2)
    assert order == [first, second, second, first]
    assert [(one.read_rate, one.write_rate) for one in found] == [(4.0, 2.0), (9.0, 9.0)]


def test_rate_of_processes_counts_from_the_first_start_to_the_last_end() -> None:
    def process(start: float, end: float) -> ProcessRuns:
        late = TimedTransfer(100, start + 50, end + 51)
        return ProcessRuns([TimedTransfer(100, start, end), late], [late, late], "io_uring")

    found = combine_runs(DiskSetting(), [process(0.0, 1.0), process(3.0, 4.0)])
    assert (found.write_rate, found.read_rate) == (200 / 4.0, 200 / 5.0)


def test_processes_start_every_transfer_together_and_one_that_fails_stops_the_others(tmp_path: Path) -> None:
    def measure_both(*folders: Path) -> list[Future[ProcessRuns]]:
        barrier = threading.Barrier(2)
        with ThreadPoolExecutor(2) as pool:
            return [pool.submit(measure_one, DiskSetting(4096, 2), one, 65536, 2, barrier) for one in folders]

    first, second = (one.result() for one in measure_both(tmp_path, tmp_path))
    for mine, its, before in zip(first.reads, second.reads, zip(first.writes, second.writes, strict=True), strict=True):
        assert min(mine.start, its.start) >= max(one.start for one in before), "a read starts after all writes"
        assert mine.nbytes == its.nbytes == 65536
    errors = [one.exception() for one in measure_both(tmp_path, tmp_path / "none")]
    assert isinstance(errors[0], threading.BrokenBarrierError) and "is not a directory" in str(errors[1])


def test_ds_io(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--io_size", "64K", "--block_size", "4K", "--queue_depth", "2", "--loops", "1"]
    assert ds_io(["--folder", str(tmp_path), *small, "--read", "--single_submit", "--engine", "aio_basic"]) == 0
    printed = capsys.readouterr().out
    assert "read: " in printed and " GB/s of 64K, processes 1, block size 4K, queue depth 2" in printed
    assert ds_io(["--folder_to_device_mapping", f"{tmp_path}:0", *small]) == 0
    assert "write: " in capsys.readouterr().out
    for words, reason in (
        ([], "no folder is given"),
        (["--folder", str(tmp_path), "--gpu"], "--gpu is not built"),
        (["--folder", str(tmp_path / "none")], "is not a directory"),
    ):
        assert ds_io([*small, *words]) == 1
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (ds_io, ["--folder", "x", "--io_size", "1M", "--loops", "0"]),
        (ds_io, ["--folder", "x", "--io_size", "1M", "--multi_process", "0"]),
        (ds_io, ["--folder", "x", "--io_size", "1M", "--io_parallel", "-1"]),
        (ds_nvme_tune, ["--nvme_dir", "x", "--loops", "0"]),
        (ds_elastic, ["-c", "x", "--world-size", "-4"]),
        (ds_bench, ["--trials", "0"]),
        (ds_bench, ["--maxsize", "99"]),
    ],
)
def test_numbers_that_measure_nothing_name_their_option(
    command: Callable[[list[str]], int], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command(words)
    assert f"{words[-2]}: '{words[-1]}' is not a whole number" in capsys.readouterr().err


def test_settings_of_benches_name_their_option() -> None:
    with pytest.raises(CommunicationError, match="--sizes 1K,0: a message has at least one byte"):
        parse_collective_settings("all", "1K,0", "fp32", 1, 2)
    with pytest.raises(StorageError, match="--threads: '0' is not a positive number"):
        parse_disk_settings("1M", "4", "0")


def test_ds_bench_refuses_a_share_of_memory_beyond_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    for share in ("0", "-1", "1.5", "nan"):
        assert ds_bench(["--device", "cuda", "--mem-factor", share]) == 1
        assert "--mem-factor" in capsys.readouterr().err


def test_ds_nvme_tune(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "sweep.json"
    config.write_text(
        '{"block_size": ["4K", "8K"], "queue_depth": [2], "io_parallel": [1, 2], "single_submit": [true]}'
    )
    logs, disk = tmp_path / "logs", tmp_path / "disk"
    disk.mkdir()
    words = ["--nvme_dir", str(disk), "--io_size", "64K", "--log_dir", str(logs), "--sweep_config", str(config)]
    assert ds_nvme_tune([*words, "--verbose", "--no_write"]) == 0
    printed = capsys.readouterr().out
    section = json.loads(printed[printed.index("{") :])
    assert section["aio"]["block_size"] in (4096, 8192) and section["aio"]["queue_depth"] == 2
    assert load_config({"train_batch_size": 1, **section}).aio.block_size == section["aio"]["block_size"]
    assert printed.count("threads ") == 4 and "Best performance (GB/sec): read = " in printed
    (log,) = logs.iterdir()
    assert len(json.loads(log.read_text())) == 4
    assert ds_nvme_tune([*words, "--no_read", "--no_write"]) == 1
    assert "nothing to measure" in capsys.readouterr().err
    monkeypatch.setattr(ds_io_module, "sweep", lambda *args, **kwargs: pytest.fail("a folder for rates comes first"))
    assert ds_nvme_tune([*words, "--log_dir", str(config)]) == 1
    assert str(config) in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[", "[1]", '{"block_size": [true]}', '{"queue_depth": ["x"]}'])
def test_bad_sweep(text: str, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(text)
    with pytest.raises(StorageError):
        read_sweep(path)


ELASTIC = {"elasticity": {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2, 3], "max_gpus": 8}}


def test_ds_elastic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ELASTIC))
    found = find_elastic_batch(load_config(ELASTIC).elasticity)
    assert ds_elastic(["-c", str(path), "-w", "4"]) == 0
    printed = capsys.readouterr().out
    assert f"final_batch_size .... {found.train}\nvalid_gpus .......... {list(found.rank_counts)}" in printed
    assert "micro_batch_size .... 3\n" in printed and '"max_train_batch_size": 100' in printed
    assert ds_elastic(["--config", str(path)]) == 0 and "micro_batch_size ...." not in capsys.readouterr().out
    assert ds_elastic(["-c", str(path), "--world-size", "7"]) == 1
    assert "cannot be shared by 7 ranks" in capsys.readouterr().err
    assert ds_elastic(["-c", str(tmp_path / "none.json")]) == 1
    for data in ({"train_batch_size": 4}, {"elasticity": {**ELASTIC["elasticity"], "enabled": False}}):
        path.write_text(json.dumps(data))
        assert ds_elastic(["-c", str(path)]) == 1
        assert 'has no "elasticity" with "enabled": true' in capsys.readouterr().err


def test_ds_ssh(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, ssh = tmp_path / "hosts", tmp_path / "bin" / "ssh"
    hosts.write_text("left slots=2\nright slots=2\n")
    ssh.parent.mkdir()
    # the last two arguments of ssh are the host and the command for its shell
    ssh.write_text('#!/bin/sh\nwhile [ $# -gt 2 ]; do shift; done\nHERE=$1 exec sh -c "$2"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(ssh.parent), prepend=":")
    monkeypatch.setattr(ssh_module, "is_installed", lambda name: False)
    assert ds_ssh(["-f", str(hosts), 'echo "at $HERE"; echo no >&2; test $HERE = left || exit 3']) == 3
    printed = capfd.readouterr()
    assert sorted(printed.out.splitlines()) == ["left: at left", "right: at right"]
    assert sorted(printed.err.splitlines()) == ["left: no", "right: no"]
    assert ds_ssh(["-f", str(hosts), "echo", "-n", "x"]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["left: x", "right: x"]
    assert ds_ssh(["-f", str(tmp_path / "none"), "true"]) == 1 and ds_ssh([]) == 1
    assert "there is no hostfile at" in capfd.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ds_ssh(["-f", str(hosts), "true"]) == 1
    assert "neither pdsh nor ssh is installed" in capfd.readouterr().err
