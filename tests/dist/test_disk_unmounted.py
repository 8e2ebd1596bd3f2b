"""Tests of the disk tier's file system disappearing during a run: removed like a device, or unmounted."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.equivalence_runs import whole_params
from tests.dist.harness import run_ranks
from tests.dist.test_disk_failure import attempt, begin, step
from tests.dist.test_offload import LATE

_SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN of ext4, xfs and f2fs: all later I/O fails with EIO
_AT_ONCE = struct.pack("I", 2)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a separate file system. Needs root and loop devices."""
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(96 << 20)
    for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(place)]):
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no file system of its own can be mounted here: {error}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)


def lose(disk: str, how: str) -> None:
    """Remove the file system, on one rank for all."""
    dist.barrier()
    if dist.get_rank() == 0:
        if how == "unmounted":
            subprocess.run(["umount", "-l", disk], check=True)
        else:
            place = os.open(disk, os.O_RDONLY)
            fcntl.ioctl(place, _SHUTDOWN, _AT_ONCE)
            os.close(place)
    dist.barrier()


def trained(folder: str, disk: str, how: str) -> dict[str, Any]:
    """Train two steps, without the file system from the second on, then continue elsewhere from the checkpoint."""
    subject, engine = begin(disk, "nvme")
    step(subject, engine, 0)
    engine.save_checkpoint(f"{folder}/saved")
    lose(disk, how)
    text: dict[str, Any] = {"step": attempt(lambda: step(subject, engine, 1))}
    if text["step"]:
        text["forward"] = attempt(lambda: step(subject, engine, 1))
        text["save"] = attempt(lambda: engine.save_checkpoint(f"{folder}/saved"))
        text["load"] = attempt(lambda: engine.load_checkpoint(f"{folder}/saved"))
    result = {} if text["step"] else whole_params(engine.module)
    text["destroy"] = attempt(engine.destroy)
    subject, engine = begin(f"{folder}/elsewhere", "nvme")
    text["again"] = attempt(lambda: engine.load_checkpoint(f"{folder}/saved"))
    step(subject, engine, 1)
    other = whole_params(engine.module)
    text["same"] = all(torch.equal(value, other[name]) for name, value in result.items())
    engine.destroy()
    return text


@pytest.mark.parametrize("how", ["pulled", "unmounted"])
def test_file_system_that_disappears(how: str, disk: Path, tmp_path: Path) -> None:
    for text in run_ranks(trained, 2, str(tmp_path), str(disk), how, env=LATE, timeout=120):
        if how == "unmounted":  # open files keep the file system alive: nothing is lost
            assert text["step"] == "" and text["same"], text
        else:
            for call in ("step", "load"):
                assert text[call].startswith("StorageError: ") and "EIO" in text[call], text
            assert "rank 0: " in text["step"] and "rank 1: " in text["step"], text
            assert "unchanged" not in text["step"] or "if the disk can still be read" in text["step"]
            assert text["forward"].startswith("StorageError: "), text
            assert "Error: nothing is saved" in text["save"], text
        assert text["destroy"] == "" and text["again"] == "", text
    assert how == "pulled" or not list(disk.glob("windlass-*"))
