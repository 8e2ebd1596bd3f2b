"""Tests of the choice of the I/O engine and its reason, and of the fallback if the system refuses one."""

from __future__ import annotations

import errno
import os
import resource
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.storage.conftest import MakeTier, refusal
from windlass.base.errors import StorageError
from windlass.storage import DiskTier, default_io_engine
from windlass.storage import io_engine as engine_file
from windlass.storage.io_engine import start_io_engine
from windlass.storage.staging_memory import aligned_buffer


def _start(engine: str, *files: int, at_once: int = 2) -> Any:
    plan = {"queue_depth": at_once, "threads": at_once, "block_size": 8192, "alignment": 1}
    return start_io_engine(list(files), requested=engine, **plan).engine


def test_the_path_in_use_names_an_engine_and_a_reason() -> None:
    name, _, why = default_io_engine().partition(" ")
    assert name == next(n for n in engine_file.ENGINES if refusal(n) is None)
    assert len(why) > 4


def test_missing_native_module_falls_back_to_python_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, make_tier: MakeTier
) -> None:
    monkeypatch.setattr(engine_file, "native_module", lambda: (None, "the native module is missing (No module)"))
    assert default_io_engine().startswith("python (the native module is missing")
    assert make_tier().description().startswith("python (")
    with pytest.raises(StorageError, match="io_uring.*is missing"):
        make_tier(engine="io_uring")


def test_refused_io_uring_falls_back_to_threads_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EPERM, "seccomp")

    working = SimpleNamespace(close=lambda: None)
    module = SimpleNamespace(Uring=refuse, Threads=lambda *arguments: working)
    monkeypatch.setattr(engine_file, "native_module", lambda: (module, ""))
    assert default_io_engine().startswith("threads (the kernel refuses io_uring (EPERM")


def test_environment_variable_selects_the_engine(monkeypatch: pytest.MonkeyPatch, make_tier: MakeTier) -> None:
    monkeypatch.setenv("WINDLASS_DISK_ENGINE", "python")
    assert make_tier().description().startswith("python (as requested)")
    monkeypatch.setenv("WINDLASS_DISK_ENGINE", "libaio")
    with pytest.raises(StorageError, match="libaio.*WINDLASS_DISK_ENGINE.*io_uring, threads, python"):
        make_tier()


def test_a_file_that_ends_early_is_a_short_read(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(range(256)) * 20)
    memory, _ = aligned_buffer(8192)
    with path.open("rb") as file:
        running = _start(engine, file.fileno())
        full = running.submit(False, [(0, 0, memory.data_ptr(), 4096, 0)])
        short = running.submit(False, [(0, 0, memory.data_ptr(), 8192, 0)])
        assert full.wait(60) and full.failure() is None
        assert short.wait(60) and short.failure() == (errno.ENODATA, 0, 0, 5120)
        running.close()


@pytest.mark.parametrize(("path", "write", "number"), [("/dev/full", True, errno.ENOSPC), (".", False, errno.EISDIR)])
def test_system_errors_are_returned(engine: str, path: str, write: bool, number: int) -> None:
    memory, _ = aligned_buffer(4096)
    file = os.open(path, os.O_WRONLY if write else os.O_RDONLY)
    try:
        running = _start(engine, file)
        request = running.submit(write, [(0, 4096 * i, memory.data_ptr(), 4096, 0) for i in range(9)])
        assert request.wait(60) and request.failure()[0] == number
        assert running.totals()[0] == running.totals()[1] == 0
        running.close()
        assert running.submit(write, [(0, 0, memory.data_ptr(), 4096, 0)]) is None
    finally:
        os.close(file)


@pytest.mark.skipif(refusal("io_uring") is not None, reason="only io_uring reads from a pipe, which has no offsets")
def test_close_cancels_queued_requests_and_waits_for_running_ones() -> None:
    reader, writer = os.pipe()  # a read from this pipe ends only when the test writes to it
    memory, _ = aligned_buffer(4096)
    span = (0, 0, memory.data_ptr(), 4096, 0)
    try:
        for _ in range(50):  # repeat until the engine has begun the read before `close`
            running = _start("io_uring", reader, at_once=1)
            in_flight, waiting = running.submit(False, [span]), running.submit(False, [span])
            in_flight.wait(0.05)
            closing = threading.Thread(target=running.close)
            closing.start()
            assert waiting.wait(60) and waiting.failure()[0] == errno.ECANCELED
            if in_flight.wait(0.05):
                assert in_flight.failure()[0] == errno.ECANCELED
                closing.join()
                continue
            assert closing.is_alive()
            os.write(writer, bytes(4096))
            closing.join(60)
            assert not closing.is_alive() and in_flight.done() and in_flight.failure() is None
            return
        pytest.fail("nothing was ever in flight")
    finally:
        os.close(reader)
        os.close(writer)


def test_failing_device_is_named_and_torn_data_not_read(tier: DiskTier, tmp_path: Path) -> None:
    kept, torn = tier.allocate(8192, "kept"), tier.allocate(40_960, "torn")
    values = torch.ones(40_960, dtype=torch.uint8)
    tier.write(kept, 0, values[:8192]).wait()
    tier.write(torn, 0, values).wait()
    os.ftruncate(tier._stripes.descriptors[0], 20_480)
    into = torch.zeros_like(values)
    reading, good = tier.read(torn, 0, into), tier.read(kept, 0, into[:8192])
    with pytest.raises(
        StorageError,
        match=r"reading 40960 bytes of torn.*at byte (20480|24576|32768|40960|49152).*disk.*short read.*checkpoint",
    ):
        reading.wait()
    with pytest.raises(StorageError, match="torn"):
        reading.poll()
    good.wait()

    os.ftruncate(tier._stripes.descriptors[0], 49_152)
    tier.write(torn, 36_864, values[36_864:]).wait()  # valid values for the page that the next write covers partly
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_480, before[1]))
    try:
        writing = tier.write(torn, 0, values[:40_000])
        with pytest.raises(StorageError, match="writing 40000 bytes of torn.*EFBIG.*ulimit -f"):
            writing.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    # byte 40,000 was not written again, but shares its page with bytes of the failed write
    for first, last in ((0, 1), (39_999, 40_000), (40_000, 40_001)):
        with pytest.raises(StorageError, match="torn.*have no value"):
            tier.read(torn, first, into[first:last])


def test_unawaited_failure_is_logged_at_close(tier: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    import logging

    extent = tier.allocate(40_000, "unheard")
    tier.write(extent, 0, torch.ones(40_000, dtype=torch.uint8)).wait()
    os.ftruncate(tier._stripes.descriptors[0], 4096)
    tier.read(extent, 0, torch.zeros(40_000, dtype=torch.uint8))
    logger = logging.getLogger("windlass")
    logger.addHandler(caplog.handler)
    try:
        while tier._transfers.extents and any(
            not t.request.done() for e in tier._transfers.extents for t in e.transfers
        ):
            pass
        tier.close()
    finally:
        logger.removeHandler(caplog.handler)
    assert "no call waited" in caplog.text and "unheard" in caplog.text


def test_requests_after_close_are_refused(tier: DiskTier) -> None:
    extent = tier.allocate(4096, "values")
    tier.close()
    tier.close()
    for act in (
        lambda: tier.allocate(1, "x"),
        lambda: tier.reserve(1),
        lambda: tier.free(extent),
        lambda: tier.allocate_buffer(4096),
        lambda: tier.write(extent, 0, torch.zeros(1)),
    ):
        with pytest.raises(StorageError, match="closed"):
            act()


@pytest.mark.parametrize(
    "options",
    [{"block_size": 1000}, {"block_size": 0}, {"queue_depth": 0}, {"threads": 0}, {"queue_depth": 5000}],
    ids=str,
)
def test_invalid_numbers_are_refused(make_tier: MakeTier, options: dict[str, int]) -> None:
    with pytest.raises(StorageError, match=str(next(iter(options.values())))):
        make_tier(**options)


@pytest.mark.parametrize("paths", [[], "disk"], ids=str)
def test_paths_other_than_a_list_are_refused(paths: Any) -> None:
    with pytest.raises(StorageError, match="list with at least one directory"):
        DiskTier(paths)


def test_many_threads_share_a_tier(tier: DiskTier) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        extent = tier.allocate(30_000, f"of thread {number}")
        for turn in range(8):
            source, back = torch.full((30_000,), number * 8 + turn, dtype=torch.uint8), torch.zeros(30_000).byte()
            tier.write(extent, 0, source)
            tier.read(extent, 0, back).wait()
            wrong.extend([number] if not torch.equal(source, back) else [])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert tier.io_rates().read_bytes == 4 * 8 * 30_000
