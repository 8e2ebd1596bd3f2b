"""Tests of small safetensors files, and of the snapshots of a parameter server in them."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from windlass.base.errors import CheckpointError, StorageError
from windlass.parameter_server.snapshot import read_snapshot, write_snapshot
from windlass.storage.tensor_file import read_tensors, write_tensors

TENSORS = {
    "b": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
    "empty": torch.empty(0, 4),
    "a": torch.tensor(True),
    "code": torch.arange(5, dtype=torch.uint8),
}


@pytest.mark.parametrize("durable", [False, True])
def test_tensors_and_metadata_come_back(durable: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_tensors(path, TENSORS, {"note": "text"}, durable=durable)
    found, metadata = read_tensors(path)
    assert list(found) == list(TENSORS) and metadata["note"] == "text"
    for name, tensor in load_file(path).items():
        assert torch.equal(found[name], tensor) and torch.equal(tensor, TENSORS[name])
    with pytest.raises(FileExistsError):
        write_tensors(path, TENSORS)


def test_a_file_is_not_writable_for_other_users(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_tensors(tmp_path / "file", TENSORS)
    finally:
        os.umask(before)
    assert not stat.S_IMODE((tmp_path / "file").stat().st_mode) & stat.S_IWOTH


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_tensors(path, TENSORS)
    whole = path.read_bytes()
    for size in (0, 7, 40, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(StorageError, match="file is damaged or not a safetensors file"):
            read_tensors(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="named pipe"):
        read_tensors(tmp_path / "pipe")
    with pytest.raises(StorageError, match="'x' has dtype torch.complex128"):
        write_tensors(tmp_path / "other", {"x": torch.zeros(1, dtype=torch.complex128)})


def test_the_state_of_an_optimizer_comes_back_from_a_snapshot(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.1), betas=(0.5, 0.75))
    parameter.grad = torch.arange(5.0)
    optimizer.step()
    content: dict[str, Any] = {
        "fragments": [(0, 1, 2)],
        "limit": math.inf,
        "optimizer": optimizer.state_dict(),
        "none": None,
    }
    for _ in range(2):  # the second one replaces the first
        write_snapshot(tmp_path / "snapshot", content)
    found = read_snapshot(tmp_path / "snapshot")
    torch.testing.assert_close(found, content, rtol=0, atol=0)
    assert type(found["fragments"][0]) is tuple and list(found["optimizer"]["state"]) == [0]
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot"]
    with pytest.raises(CheckpointError, match=r"cannot hold state\['optimizer'\]\[1\], of type object"):
        write_snapshot(tmp_path / "snapshot", {"optimizer": [1, object()]})
