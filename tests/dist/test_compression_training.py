"""Tests that compression during training gives the same model at every ZeRO stage as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import windlass
from tests.dist.harness import run_ranks
from windlass.compress.compression_training import compression_clock, init_compression

STEPS, ROWS = 5, 4


def technique(shared: dict[str, Any], params: dict[str, Any], modules: str) -> dict[str, Any]:
    groups = {"group": {"params": params, "modules": [modules]}}
    return {"shared_parameters": {"enabled": True, **shared}, "different_groups": groups}


CONFIG: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.0}},
    "gradient_clipping": 0.0,
    "train_batch_size": ROWS,
    "compression_training": {
        "weight_quantization": technique(
            {"schedule_offset": 1, "quantize_groups": 4, "rounding": "stochastic"},
            {"start_bits": 5, "target_bits": 3, "quantization_period": 1},
            "first",
        ),
        "activation_quantization": technique({"schedule_offset": 2}, {"bits": 6}, "second"),
        "sparse_pruning": technique({"schedule_offset": 0, "method": "topk"}, {"dense_ratio": 0.5}, "second"),
        "row_pruning": technique({"schedule_offset": 3, "method": "l1"}, {"dense_ratio": 0.5}, "first"),
    },
}


class Model(nn.Module):
    """Two blocks of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"first": nn.Linear(12, 20), "second": nn.Linear(20, 12)}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["second"](torch.tanh(block["first"](x)))
        return (x - 1).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, 12, generator=torch.Generator().manual_seed(step))


def prepared() -> nn.Module:
    torch.manual_seed(0)
    return init_compression(Model(), CONFIG)


def plain() -> tuple[list[float], dict[str, Tensor]]:
    model, losses = prepared(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    for step in range(STEPS):
        compression_clock(model).step = step
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(stage: int, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train, resuming from a checkpoint after two steps with a new engine."""
    losses: list[float] = []
    share = ROWS // dist.get_world_size()
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    for first, last in ((0, 2), (2, STEPS)):
        engine = windlass.initialize(model=prepared(), config=config)[0]
        if first:
            engine.load_checkpoint(folder)
        for step in range(first, last):
            loss = engine(batch(step)[dist.get_rank() * share :][:share])
            engine.backward(loss)
            engine.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(float(total) / dist.get_world_size())
        if not first:
            engine.save_checkpoint(folder)
        state = engine.full_state_dict()
        engine.destroy()
    return losses, state if dist.get_rank() == 0 else {}


@pytest.mark.parametrize(
    ("stage", "ranks", "transport"), [(0, 2, "gloo"), (1, 1, "gloo"), (2, 2, "shm"), (3, 2, "shm")]
)
def test_every_stage_trains_the_same_compressed_model(stage: int, ranks: int, transport: str, tmp_path: Path) -> None:
    losses, state = plain()
    found, sharded = run_ranks(train, ranks, stage, str(tmp_path), transport=transport)[0]
    assert found == pytest.approx(losses, rel=2e-5)
    assert sharded.keys() == state.keys() and any("scores" in name for name in state)
    for name, value in state.items():
        torch.testing.assert_close(sharded[name].to(value.dtype), value, rtol=1e-4, atol=1e-5)


def unprepared() -> str:
    with pytest.raises(windlass.WindlassError) as caught:
        windlass.initialize(model=Model(), config=CONFIG)
    return str(caught.value)


def test_a_model_that_was_not_prepared_is_refused() -> None:
    assert "call init_compression(model, config)" in run_ranks(unprepared, 1, transport="gloo")[0]
