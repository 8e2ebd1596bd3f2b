"""Tests of the identity of the teacher of a `distillation.cache`."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from windlass.cli.training.teacher import _identity


def test_teachers_that_differ_in_one_element_differ(tmp_path: Path) -> None:
    """Fine-tuned models may differ in any part of a matrix, not only in its first elements."""
    found = []
    for name, value in (("a", 0.0), ("b", 1.0), ("c", 1.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        tensors = {"embed": torch.zeros(1024, 512), "layer": torch.zeros(64, 64)}
        tensors["embed"][900, 7] = value
        save_file(tensors, tmp_path / name / "model.safetensors")
        found.append(_identity(tmp_path / name, tmp_path / "record.json"))
    assert found[0] != found[1] == found[2]


def test_files_are_read_again_when_they_change(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights, record = tmp_path / "pytorch_model.bin", tmp_path / "record.json"
    weights.write_bytes(b"weights")
    first = _identity(tmp_path, record)
    state = weights.stat()
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert _identity(tmp_path, record) == first, "the hash is known by size and time"
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    second = _identity(tmp_path, record)
    assert second != first
    record.write_text("damaged")
    assert _identity(tmp_path, record) == second
