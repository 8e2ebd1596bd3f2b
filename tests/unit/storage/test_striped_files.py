"""Tests of striping a tier over files: each byte has one place, and files are no longer than necessary."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windlass.base.errors import StorageError
from windlass.storage import striped_files
from windlass.storage.disk_tier import DiskTier
from windlass.storage.striped_files import StripedFiles, filesystem_of

PAGE = 4096


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(1, 4), block=st.integers(1, 3), end=st.integers(1, 20))
def test_stripes_map_every_byte_once_without_trailing_space(tmp_path: Path, count: int, block: int, end: int) -> None:
    stripes = StripedFiles([tmp_path / str(i) for i in range(count)], block * PAGE, "test")
    try:
        stripes.resize(end * PAGE, "all")
        sizes = [os.fstat(file).st_size for file in stripes.descriptors]
        places: dict[int, tuple[int, int]] = {}  # file and offset of each page of the full range
        for piece in stripes.locate(0, end * PAGE):
            assert piece.nbytes <= block * PAGE
            pages = {piece.start + i: (piece.file, piece.offset + i) for i in range(0, piece.nbytes, PAGE)}
            assert not {*places.values()} & {*pages.values()}
            assert piece.offset + piece.nbytes <= sizes[piece.file]
            places |= pages
        assert sorted(places) == list(range(0, end * PAGE, PAGE)) and end == sum(sizes) // PAGE
        assert max(sizes) - min(sizes) <= block * PAGE
        for first in range(end):  # a single page is at its place in the full range
            piece = stripes.locate(first * PAGE, (first + 1) * PAGE)
            assert len(piece) == 1 and (piece[0].file, piece[0].offset) == places[first * PAGE] and piece[0].start == 0
    finally:
        stripes.close()


def test_the_file_system_of_a_path_is_named() -> None:
    assert filesystem_of(Path("/proc/self")) == "proc"
    assert filesystem_of(Path("/dev/shm/there-is-no-such-file")) in ("tmpfs", filesystem_of(Path("/dev")))


def test_tmpfs_path_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    if filesystem_of(Path("/dev/shm")) != "tmpfs" or not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no tmpfs at /dev/shm")
    logger = logging.getLogger("windlass")
    logger.addHandler(caplog.handler)
    try:
        with DiskTier(["/dev/shm"]) as tier:
            assert [r.getMessage() for r in caplog.records if "this is memory" in r.getMessage()] != []
            assert len(caplog.records) == 1
            assert all(path.exists() for path in tier.directories())
    finally:
        logger.removeHandler(caplog.handler)


def test_file_system_without_direct_io_is_logged_and_supported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr("windlass.storage.striped_files.enable_direct_io", lambda descriptor: False)
    logger = logging.getLogger("windlass")
    logger.addHandler(caplog.handler)
    try:
        with DiskTier([tmp_path]) as tier:
            assert "refuses direct I/O" in caplog.text and str(tmp_path) in caplog.text
            assert "through the page cache" in tier.description()
            extent, back = tier.allocate(10_000, "x"), torch.zeros(10_000, dtype=torch.uint8)
            tier.write(extent, 0, torch.full((10_000,), 7, dtype=torch.uint8)).wait()
            tier.read(extent, 0, back).wait()
            assert bool((back == 7).all())
    finally:
        logger.removeHandler(caplog.handler)


def test_one_bad_path_leaves_no_files_in_the_others(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file"):
        StripedFiles([tmp_path / "good", tmp_path / "file"], PAGE, "test")
    assert list((tmp_path / "good").iterdir()) == []


def test_failed_growth_names_the_path_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stripes = StripedFiles([tmp_path / name for name in "abc"], PAGE, "test")
    resize = striped_files._resize

    def refuse(file: striped_files._StripeFile, size: int) -> None:
        if file.path.name == "b":
            raise OSError(errno.ENOSPC, "No space left on device")
        resize(file, size)

    monkeypatch.setattr(striped_files, "_resize", refuse)
    try:
        with pytest.raises(StorageError, match=f"more needed on {tmp_path / 'b'},"):
            stripes.resize(6 * PAGE, "all")
        assert [os.fstat(file).st_size for file in stripes.descriptors] == [0, 0, 0]
    finally:
        stripes.close()
