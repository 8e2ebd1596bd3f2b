"""Tests that an export from a checkpoint of any stage equals the gathered model, and that old tags are removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.dist.harness import run_ranks


class Everything(nn.Module):
    """Tied, frozen and trained parameters of awkward shapes, and buffers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(29, 7), nn.Linear(7, 29, bias=False)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.norm = nn.BatchNorm1d(7)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.scale * self.frozen(self.embed(ids)).mean(1))
        return F.cross_entropy(self.head(x).float(), ids[:, 0])


def trained(folder: str, stage: int, precision: str) -> dict[str, Tensor]:
    """Train four steps with a save after each. Return the gathered model on rank 0."""
    import windlass

    torch.manual_seed(dist.get_rank())
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "checkpoint": {"keep_last": 2},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    engine = windlass.initialize(model=Everything(), config=config)[0]
    for step in range(4):
        ids = torch.randint(0, 29, (4, 5), generator=torch.Generator().manual_seed(7 * step + dist.get_rank()))
        engine.backward(engine(ids))
        engine.step()
        engine.save_checkpoint(folder, tag=None if step else "first")
    state = engine.full_state_dict()
    engine.destroy()
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize(("stage", "precision"), [(3, "bf16"), (1, "fp16"), (3, "fp32")])
def test_export_equals_the_full_model(stage: int, precision: str, tmp_path: Path) -> None:
    from windlass.checkpoint import list_tags
    from windlass.checkpoint.safetensors_export import export_safetensors

    expected = run_ranks(trained, 2, str(tmp_path / "run"), stage, precision)[0]
    assert list_tags(tmp_path / "run") == ["global_step3", "global_step4"], "checkpoint.keep_last"
    actual = export_safetensors(tmp_path / "run", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert actual.tied == {"head.weight": "embed.weight"}
    assert set(written) == set(expected) - {"head.weight"}
    for name, value in written.items():
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value.view(-1).view(torch.uint8), expected[name].reshape(-1).view(torch.uint8)), name


def tags_after_rotation(own: str, other: str) -> list[str]:
    import windlass
    from windlass.checkpoint import SavedState, list_tags, save

    save(other, "best", SavedState(), save_latest=False)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "checkpoint": {"keep_last": 1},
    }
    engine = windlass.initialize(model=torch.nn.Linear(2, 2), config=config)[0]
    engine.save_checkpoint(own, tag="best")
    engine.save_checkpoint(other, tag="last")
    engine.save_checkpoint(other, tag="next")
    engine.destroy()
    return list_tags(other)


def test_rotation_spares_a_tag_that_the_engine_wrote_to_another_directory(tmp_path: Path) -> None:
    assert run_ranks(tags_after_rotation, 1, str(tmp_path / "own"), str(tmp_path / "other")) == [["best", "next"]]
