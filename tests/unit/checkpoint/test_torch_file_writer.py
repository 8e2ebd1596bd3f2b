"""Tests of writing files for `torch.load` without `torch.save`: their content, and unsupported values."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint.pickle_writer import PickledObject, PlannedTensor
from windlass.checkpoint.torch_file_writer import TorchFileWriter, write_torch_file
from windlass.compat.checkpoint.torch_file import read_torch_file

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128]


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_load_reads_the_written_file(mmap: bool, tmp_path: Path) -> None:
    path, full = tmp_path / "a_states.pt", torch.randn(5, 3)
    planned = PlannedTensor(torch.bfloat16, (4, 2), lambda: [torch.ones(3), torch.zeros(5)])
    value: dict[Any, Any] = {
        "plain": [None, True, False, 3, -1, 2**31, -(2**40), 2**70, 1.5, float("inf"), "ü\n", (), [], {}, (1, [2])],
        3: torch.float16,
        "size": torch.Size([3, 4]),
        "ordered": OrderedDict(x=full, y=full.t()),
        "twice": (planned, planned),
        "number": torch.tensor(2.5),
        "empty": torch.empty(0, 7),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "kinds": [torch.ones(3).to(dtype) for dtype in DTYPES],
    }
    write_torch_file(path, value)
    result = torch.load(path, weights_only=True, mmap=mmap)
    for key in ("plain", 3, "size"):
        assert result[key] == value[key] and type(result[key]) is type(value[key])
    assert list(result["ordered"]) == ["x", "y"] and isinstance(result["ordered"], OrderedDict)
    assert torch.equal(result["ordered"]["x"], full) and torch.equal(result["ordered"]["y"], full.t())
    assert result["twice"][0] is result["twice"][1]
    assert result["twice"][0].tolist() == [[1, 1], [1, 0], [0, 0], [0, 0]]
    assert result["number"].item() == 2.5 and result["empty"].shape == (0, 7)
    assert result["conjugate"].tolist() == [1 - 2j]
    for item, dtype in zip(result["kinds"], DTYPES, strict=True):
        assert item.dtype == dtype and item.tolist() == [1, 1, 1]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    stored = read_torch_file(path)
    assert stored["ordered"]["x"].begin % 64 == 0, "aligned, for readers that map the file"
    assert [one.dtype for one in stored["kinds"]] == DTYPES


def test_referenced_objects_are_named_without_import(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    write_torch_file(
        path, {"s": PickledObject("deepspeed.runtime.fp16.loss_scaler", "LossScaler", attributes={"cur_scale": 4.0})}
    )
    assert read_torch_file(path)["s"].attributes == {"cur_scale": 4.0}
    write_torch_file(path, PickledObject("collections", "OrderedDict", arguments=([("a", 1)],)))
    assert torch.load(path, weights_only=True) == {"a": 1}


def test_unsupported_values_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    for value, text in (
        ({"x": {1, 2}}, "a builtins.set cannot be written"),
        ([torch.zeros(1, dtype=torch.uint16)], "dtype torch.uint16"),
        ([1 << 3000], "an integer of"),
        ([PlannedTensor(torch.float32, (3,), lambda: [torch.ones(2)])], "should have 12 bytes, and has 8"),
    ):
        with pytest.raises(CheckpointError, match=text):
            write_torch_file(path, value)
    with pytest.raises(CheckpointError, match="1 tensors were not written"), TorchFileWriter(path, torch.ones(2)):
        pass
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_torch_file(tmp_path / "no" / "a.pt", 1)
