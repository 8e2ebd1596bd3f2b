"""Tests of a disk with too little space: an error before data is lost, with the request, the free space and the fix."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.unit.storage.conftest import MakeTier
from windlass.base.errors import StorageError

_MIB = 1 << 20


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.storage.striped_files._warn_about_filesystem", lambda file: None)


def test_full_disk_refuses_and_keeps_its_data(make_tier: MakeTier, small_disk: Path) -> None:
    tier = make_tier(paths=[small_disk])
    kept = tier.allocate(2 * _MIB, "kept")
    values = torch.randint(0, 256, (2 * _MIB,), dtype=torch.uint8)
    tier.write(kept, 0, values).wait()
    with pytest.raises(
        StorageError, match=f"no space for moments: 3.00 MiB more needed on {small_disk}, .* free; free"
    ):
        tier.allocate(3 * _MIB, "moments")
    assert os.fstat(tier._stripes.descriptors[0]).st_size == 2 * _MIB
    back = torch.zeros_like(values)
    tier.read(kept, 0, back).wait()
    assert torch.equal(back, values)
    tier.allocate(_MIB, "fits")
    with pytest.raises(StorageError, match="all offloaded tensors: 97.00 MiB more"):
        tier.reserve(100 * _MIB)
    tier.free(kept)
    tier.allocate(2 * _MIB, "fits again")


def test_reserved_space_is_really_taken(make_tier: MakeTier, small_disk: Path) -> None:
    first, second = make_tier(paths=[small_disk]), make_tier(paths=[small_disk])
    first.reserve(3 * _MIB)
    with pytest.raises(StorageError, match="2.00 MiB more"):
        second.reserve(2 * _MIB)
    first.allocate(3 * _MIB, "reserved")
    first.close()
    second.reserve(2 * _MIB)


def test_two_paths_on_one_disk_share_its_space(make_tier: MakeTier, small_disk: Path) -> None:
    tier = make_tier(paths=[small_disk / "a", small_disk / "b"])
    with pytest.raises(StorageError, match="6.00 MiB more"):
        tier.reserve(6 * _MIB)
    tier.reserve(3 * _MIB)


def test_reservation_is_rolled_back_if_the_disk_fills_up(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tier = make_tier(paths=[tmp_path / "a", tmp_path / "b"])
    tier.allocate(40_000, "first")
    sizes = [os.fstat(file).st_size for file in tier._stripes.descriptors]
    really = os.posix_fallocate

    def fill_up(file: int, offset: int, nbytes: int) -> None:
        if file == tier._stripes.descriptors[1]:
            raise OSError(errno.ENOSPC, "full")
        really(file, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", fill_up)
    with pytest.raises(StorageError, match=f"no space for second.*{tmp_path / 'b'}.*ENOSPC"):
        tier.allocate(100_000, "second")
    assert [os.fstat(file).st_size for file in tier._stripes.descriptors] == sizes
    monkeypatch.undo()
    assert tier.allocate(100_000, "second").start == 40_960


def test_free_space_is_checked_before_reserving(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tier = make_tier(paths=[tmp_path / "a", tmp_path / "b"])  # on one disk: half of the bytes would fit, all do not
    monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: pytest.fail("space was taken"))
    monkeypatch.setattr(os, "fstatvfs", lambda file: SimpleNamespace(f_bavail=10, f_frsize=4096))
    with pytest.raises(StorageError, match="no space for values: 45056 bytes more needed.*40960 bytes free"):
        tier.allocate(40_961, "values")


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_file_system_without_fallocate_is_supported(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*arguments: int) -> None:
        raise OSError(number, "no such promise here")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    tier = make_tier()
    extent, back = tier.allocate(10_000, "values"), torch.zeros(10_000, dtype=torch.uint8)
    tier.write(extent, 5, torch.ones(20, dtype=torch.uint8)).wait()
    tier.read(extent, 5, back[:20]).wait()
    assert int(back.sum()) == 20


def test_file_size_limit_is_reported(make_tier: MakeTier) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    tier = make_tier()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(StorageError, match="EFBIG.*ulimit -f"):
            tier.allocate(2 << 20, "values")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
