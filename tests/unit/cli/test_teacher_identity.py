"""Identity of the teacher of a `distillation.cache`."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from windlass.cli.training.teacher import _identity


def test_teachers_that_differ_in_one_matrix_differ(tmp_path: Path) -> None:
    """Fine-tunes of one base begin alike: their embeddings are larger than what a hash of the beginning would see."""
    tensors = {"embed": torch.zeros(1024, 512), "layer": torch.zeros(64, 64)}
    found = []
    for name, values in (("a", 0.0), ("b", 1.0), ("c", 1.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file({**tensors, "layer": torch.full((64, 64), values)}, tmp_path / name / "model.safetensors")
        found.append(_identity(tmp_path / name))
    assert found[0] != found[1] == found[2]
