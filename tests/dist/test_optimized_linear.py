"""Tests of `deepspeed.linear.Init` inside `zero.Init`: packed bases are sharded, adapters train as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import windlass
from tests.dist.averaged_losses import part_of_rank, train_and_end
from tests.dist.harness import run_ranks
from windlass.compat.optimized_linear import LoRAConfig, OptimizedLinearInit, QuantizationConfig, init_lora
from windlass.kernels.packed_linear import PackedLinear
from windlass.zero import Init
from windlass.zero.sharded_init import initial_shard

ROWS, STEPS, RATE = 4, 3, 0.05


class Net(nn.Module):
    """Two linear layers, with and without bias, and a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(24, 40), nn.LayerNorm(40), nn.Linear(40, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.norm(self.first(x)).relu())
        return out.square().mean()


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size() if dist.is_initialized() else ROWS,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }


def build(order: str, quantized: bool, stage: int) -> Any:
    torch.manual_seed(5)
    outer = Init(config_dict_or_path=config(stage), enabled=stage == 3)
    inner = OptimizedLinearInit(LoRAConfig(lora_r=4), QuantizationConfig(group_size=64) if quantized else None)
    with outer if order == "outside" else inner, inner if order == "outside" else outer:
        model = Net()
    init_lora(model)
    return model


def train(order: str, quantized: bool, stage: int) -> dict[str, Any]:
    model = build(order, quantized, stage)
    packed = [
        p for m in model.modules() if isinstance(m, PackedLinear) for p in m.parameters() if p.dtype == torch.uint8
    ]
    held = sum(p.numel() if (s := initial_shard.find(p)) is None else s.shard.numel() for p in packed)
    bases = sum(isinstance(module, PackedLinear) for module in model.modules())
    engine = windlass.initialize(model=model, config=config(stage))[0]

    def loss_of_step(step: int) -> Tensor:
        rows = torch.randn(ROWS, 24, generator=torch.Generator().manual_seed(step))
        loss: Tensor = engine(part_of_rank(rows))
        return loss

    losses, state = train_and_end(engine, loss_of_step, STEPS)
    return {"losses": losses, "state": state, "held": held, "bases": bases}


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("order", ["outside", "inside"])
def test_layers_made_in_both_contexts_train_as_in_one_process(order: str, quantized: bool) -> None:
    (wanted,) = run_ranks(train, 1, order, quantized, 0)
    found = run_ranks(train, 2, order, quantized, 3)
    assert wanted["bases"] == found[0]["bases"] == (2 if quantized else 0)
    assert found[0]["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert wanted["losses"][-1] != wanted["losses"][0]
    assert found[0]["state"].keys() == wanted["state"].keys()
    for name, value in wanted["state"].items():
        torch.testing.assert_close(found[0]["state"][name], value, rtol=1e-5, atol=1e-6)
    if quantized:
        whole = wanted["held"]
        assert all(whole / 2 <= one["held"] <= whole / 2 + 64 for one in found), "each rank holds its half"
