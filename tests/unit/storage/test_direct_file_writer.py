"""Tests that new files hold the submitted bytes, for any order and size of the writes."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windlass.storage import DirectFileWriter, direct_file_writer
from windlass.storage.io_engine import ENGINES


def pieces(nbytes: int, cuts: list[int], order: int) -> list[tuple[int, int]]:
    ends = sorted({0, nbytes, *(cut % (nbytes + 1) for cut in cuts)})
    results = list(zip(ends, ends[1:], strict=False))
    random.Random(order).shuffle(results)
    return results


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    nbytes=st.integers(0, 20_000) | st.integers(60_000, 280_000),
    cuts=st.lists(st.integers(0, 280_000), max_size=12),
    order=st.integers(0, 99),
    shift=st.integers(0, 4095),
)
def test_pieces_in_any_order_form_the_file(
    tmp_path: Path, nbytes: int, cuts: list[int], order: int, shift: int
) -> None:
    full = torch.randint(0, 256, (shift + nbytes,), dtype=torch.uint8)[shift:]
    with DirectFileWriter(tmp_path / "file", nbytes) as file:
        for number, (first, last) in enumerate(pieces(nbytes, cuts, order)):
            file.submit(first, full[first:last])
            if number % 3 == 2:
                file.wait()
    assert (tmp_path / "file").read_bytes() == full.numpy().tobytes()


def test_many_small_pieces_are_a_few_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, writes = torch.randint(0, 256, (500_000,), dtype=torch.uint8), 0
    with DirectFileWriter(tmp_path / "file", full.numel()) as file:
        engine: Any = file._engine

        def counted(write: bool, spans: Any) -> Any:
            nonlocal writes
            writes += 1
            return engine.submit(write, spans)

        monkeypatch.setattr(file, "_engine", SimpleNamespace(submit=counted, close=engine.close))
        for first in range(0, full.numel(), 1000):
            file.submit(first, full[first : first + 1000])
    assert (tmp_path / "file").read_bytes() == full.numpy().tobytes()
    assert writes <= full.numel() // (1 << 16) + 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("direct", [True, False])
def test_every_engine_writes_with_and_without_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, direct: bool
) -> None:
    monkeypatch.setenv("WINDLASS_DISK_ENGINE", engine)
    if not direct:
        monkeypatch.setattr(direct_file_writer, "enable_direct_io", lambda descriptor: False)
    full = torch.randint(0, 256, ((3 << 20) + 77,), dtype=torch.uint8)
    (tmp_path / "file").write_bytes(b"something longer" * (1 << 18))  # the writer replaces an existing file
    with DirectFileWriter(tmp_path / "file", full.numel()) as file:
        file.submit(5, full[5:])
        file.submit(0, full[:5])
    assert (tmp_path / "file").read_bytes() == full.numpy().tobytes()


class Gone:
    """Request that fails with an error."""

    def __init__(self, number: int) -> None:
        self._number = number

    def wait(self, seconds: float) -> bool:
        return True

    def failure(self) -> tuple[int, int, int, int]:
        return self._number, 0, 0, 0


@pytest.mark.parametrize(("number", "told"), [(errno.ENOSPC, errno.ENOSPC), (errno.ENODATA, errno.EIO)])
def test_failed_block_is_reported_with_its_path(tmp_path: Path, number: int, told: int) -> None:
    file = DirectFileWriter(tmp_path / "file", 8192)
    full: Any = file._engine
    file._engine = type("Engine", (), {"submit": lambda *a: Gone(number), "close": full.close})()
    with pytest.raises(OSError, match="file") as raised, file:
        file.submit(0, torch.zeros(8192, dtype=torch.uint8))
    assert raised.value.errno == told


def test_lack_of_space_is_detected_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError) as raised:
        DirectFileWriter(tmp_path / "file", 8192)
    assert raised.value.errno == errno.ENOSPC
    assert len(os.listdir("/proc/self/fd")) == before, "a file stays open"
