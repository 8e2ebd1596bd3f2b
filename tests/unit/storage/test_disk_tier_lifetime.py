"""Tests of the files of a tier: they are private, and are removed with the tier, or later if the process was killed. No
other files are removed."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import pytest
import torch

from tests.unit.storage.conftest import MakeTier
from windlass.base.errors import StorageError
from windlass.storage import DiskTier
from windlass.storage.process_directory import process_start_time, remove_stale_directories


def _left(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()]


def test_files_are_private_and_have_no_name(tier: DiskTier, tmp_path: Path) -> None:
    (directory,) = tier.directories()
    assert directory.parent == tmp_path / "disk"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    state = os.fstat(tier._stripes.descriptors[0])
    assert stat.S_IMODE(state.st_mode) == 0o600 and state.st_nlink == 0
    assert not os.get_inheritable(tier._stripes.descriptors[0])
    tier.close()
    assert _left(tmp_path / "disk") == []


def test_unreferenced_tier_is_closed(make_tier: MakeTier, engine: str, tmp_path: Path) -> None:
    tier = DiskTier([tmp_path], engine=engine)
    pending = tier.write(tier.allocate(1 << 20, "values"), 0, torch.zeros(1 << 18))
    del tier
    assert _left(tmp_path) == []
    try:
        pending.wait()
    except StorageError as error:
        assert "was closed before" in str(error)


def test_only_own_directories_of_dead_processes_are_removed(make_tier: MakeTier, tmp_path: Path) -> None:
    tier = make_tier(paths=[tmp_path])
    (live,) = tier.directories()
    _, user, host, pid, started, label, _ = live.name.split("-")
    dead = [user, host, "999999999", started, label, "x"]
    keep = {
        "another user's": [str(int(user) + 1), *dead[1:]],
        "another host's": [user, host + "x", *dead[2:]],
        "alive, with the start time that it has": [user, host, "1", process_start_time(1), label, "x"],
        "not named as ours are": ["x", *dead[1:]],
        "locked by somebody we can't see": [*dead[:-1], "locked"],
    }
    remove = {"dead": dead, "a number that another process has now": [user, host, pid, "1", label, "x"]}
    for parts in (*keep.values(), *remove.values()):
        (tmp_path / "-".join(["windlass", *parts])).mkdir()
    (tmp_path / "-".join(["windlass", *dead[:-1], "file"])).write_text("a file, no directory")
    lock = os.open(tmp_path / "-".join(["windlass", *keep["locked by somebody we can't see"]]), os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        remove_stale_directories(tmp_path)
    finally:
        os.close(lock)
    expected = {"-".join(["windlass", *parts]) for parts in keep.values()}
    assert set(_left(tmp_path)) == expected | {live.name, "-".join(["windlass", *dead[:-1], "file"])}


def test_file_at_the_directory_path_is_refused_by_name(make_tier: MakeTier, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match=f"{path}.*a file is where a directory should be"):
            make_tier(paths=[path])


def test_unwritable_directory_is_refused_by_name(make_tier: MakeTier, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if os.access(closed, os.W_OK):  # root may write to any other directory
        closed = Path("/proc/self")
    with pytest.raises(StorageError, match=f"{closed}.*"):
        make_tier(paths=[closed / "below"])
