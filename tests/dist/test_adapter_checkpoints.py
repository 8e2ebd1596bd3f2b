"""Tests that adapter checkpoints contain only trained parameters and buffers, and load only over the same base."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import windlass
from tests.dist.harness import run_ranks

WIDTH = 256


class Adapted(nn.Module):
    """Two frozen matrices, one with a low-rank adapter, and running statistics that change."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 6 * WIDTH).requires_grad_(False)
        self.back = nn.Linear(6 * WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, 6 * WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.tanh(self.base(self.norm(x)) + self.up(self.down(x)))).square().mean()


def engine_for(stage: int, rank: int = 32, base_seed: int = 0, seed: int = 0, frozen: str = "") -> Any:
    torch.manual_seed(base_seed)
    model = Adapted(rank)
    torch.manual_seed(seed)
    for adapter in (model.down, model.up):
        adapter.reset_parameters()
    if frozen:
        model.get_submodule(frozen).requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return windlass.initialize(model=model, config=config)[0]


def steps(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = engine(torch.randn(8, WIDTH, generator=generator))
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    return losses


def mean_of(engine: Any) -> Tensor:
    """Return the running mean of rank 0, which is the one in a checkpoint."""
    mean = engine.module.norm.running_mean.clone()
    dist.broadcast(mean, 0)
    return mean


def saved(folder: str, stage: int) -> dict[str, Any]:
    """Save adapters, and resume them in another engine at another stage, and then over another base."""
    engine = engine_for(stage)
    steps(engine, 0, 2)
    engine.save_checkpoint(folder)
    mean = mean_of(engine)
    trained = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    expected = steps(engine, 2, 4)
    engine.destroy()
    other = engine_for(3 - stage, seed=9)
    other.load_checkpoint(folder)
    same_mean = torch.equal(other.module.norm.running_mean, mean)
    actual = steps(other, 2, 4)
    with windlass.zero.GatheredParameters([other.module.back.bias], modifier_rank=0):
        if dist.get_rank() == 0:
            with torch.no_grad():
                other.module.back.bias[3] += 1e-3
    text = ""
    try:
        other.load_checkpoint(folder)
    except windlass.WindlassError as error:
        text = str(error)
    other.load_checkpoint(folder, load_module_strict=False)
    over_another = steps(other, 2, 3)[0]
    other.destroy()
    return {
        "trained": trained,
        "wanted": expected,
        "found": actual,
        "mean": same_mean,
        "said": text,
        "over_another": over_another,
    }


@pytest.mark.parametrize("stage", [0, 3])
def test_checkpoints_of_adapters_resume_over_their_base(stage: int, tmp_path: Path) -> None:
    for result in run_ranks(saved, 2, str(tmp_path), stage):
        assert result["found"] == pytest.approx(result["wanted"], rel=1e-6)
        assert result["mean"], "running statistics are part of what was trained"
        assert "1 frozen parameters (this model has 4) have other values: back.bias" in result["said"]
        assert result["over_another"] != result["wanted"][0]
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert size <= 1.1 * 3 * 4 * result["trained"], "masters and two moments in float32"


def with_an_adapter_frozen(folder: str, stage: int) -> list[str]:
    """Return the parameters that differ from the saved ones after a load into a run that freezes an adapter."""
    engine = engine_for(stage)
    steps(engine, 0, 2)
    engine.save_checkpoint(folder)
    expected = engine.full_state_dict()
    engine.destroy()
    other = engine_for(3 - stage, seed=9, frozen="down")
    other.load_checkpoint(folder, load_optimizer_strict=False)
    actual = other.full_state_dict()
    other.destroy()
    return [name for name, value in expected.items() if not torch.equal(actual[name], value)]


@pytest.mark.parametrize("stage", [0, 3])
def test_adapter_that_is_frozen_now_is_loaded_too(stage: int, tmp_path: Path) -> None:
    assert run_ranks(with_an_adapter_frozen, 2, str(tmp_path), stage)[0] == []


def kept(folder: str) -> dict[str, list[str]]:
    """Return the stored modules and missing parameters of checkpoints of models that train few or many parameters."""
    made = {}
    for name, rank, requested in (
        ("few", 16, None),
        ("few, all", 16, False),
        ("many", 80, None),
        ("many, some", 80, True),
    ):
        engine = engine_for(3, rank)
        more = {} if requested is None else {"exclude_frozen_parameters": requested}
        engine.save_checkpoint(folder, tag=name, **more)
        engine.destroy()
        stored = windlass.read_checkpoint(folder, name)
        made[name] = sorted({key.split(".")[0] for key in stored.model_state_dict()}), stored.missing_parameters()
    return made


def test_frozen_parameters_are_left_out_by_default(tmp_path: Path) -> None:
    result = run_ranks(kept, 1, str(tmp_path))[0]
    frozen = ("base.weight", "base.bias", "back.weight", "back.bias")
    assert result["few"] == result["many, some"] == (["down", "norm", "up"], frozen)
    assert result["many"] == result["few, all"] == (["back", "base", "down", "norm", "up"], ())


class Grown(Adapted):
    """Model whose base has one more layer."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.back = nn.Sequential(self.back, nn.Linear(WIDTH, WIDTH).requires_grad_(False))


def over_another(folder: str) -> list[str]:
    """Return errors of loads for a base that changed between saves and for a base with another layer.

    The last item lists the stages at which a save hashed an unchanged base again.
    """
    from windlass.checkpoint.tensor_hash import TensorHash
    from windlass.engine import frozen_parameters

    text, read = [], []
    for stage in (1, 3):
        engine = engine_for(stage, 16)
        engine.save_checkpoint(folder, tag=f"first {stage}")
        with mock.patch.object(frozen_parameters, "TensorHash", lambda stage=stage: read.append(stage) or TensorHash()):
            steps(engine, 0, 1)
            engine.save_checkpoint(folder, tag=f"again {stage}")
        bias = engine.module.base.bias
        if stage == 1:
            with torch.no_grad():
                bias[0] += 1.0
        else:
            windlass.zero.set_full_param(bias, windlass.zero.full_param(bias).detach() + 1.0)
        engine.save_checkpoint(folder, tag=f"changed {stage}")
        engine.destroy()
    engine = engine_for(2, 16)
    for tag in ("again 1", "again 3", "changed 1", "changed 3"):
        text.append(refusal(engine, folder, tag))
    engine.destroy()
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 0}, "optimizer": {"type": "AdamW"}}
    torch.manual_seed(0)
    engine = windlass.initialize(model=Grown(16), config=config)[0]
    text.append(refusal(engine, folder, "first 1"))
    engine.destroy()
    return [*text, str(read)]


def refusal(engine: Any, folder: str, tag: str) -> str:
    try:
        engine.load_checkpoint(folder, tag=tag)
    except windlass.WindlassError as error:
        return str(error)
    return ""


def test_base_is_hashed_again_only_after_a_change_and_needs_the_same_names(tmp_path: Path) -> None:
    for text in run_ranks(over_another, 2, str(tmp_path)):
        assert text[0] == text[1] == "" and text[5] == "[]", "what did not change was read again"
        assert "1 frozen parameters (this model has 4) have other values: base.bias" in text[2]
        assert text[3] == text[2].replace("changed 1", "changed 3")
        for words in (
            "4 frozen parameters (this model has 6) are not in the checkpoint: back.0.",
            "2 frozen parameters (this model has 6) are not in this model: back.",
        ):
            assert words in text[4], text[4]
