"""Test of `weight_quantization` on two ranks: packed shards of rank 0's weights, and the outputs of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import windlass
from tests.dist.harness import run_ranks
from windlass.compat.module_quantization import init_group_wise_weight_quantization
from windlass.kernels.packed_linear import PackedEmbedding, PackedLinear, PackedMatrix
from windlass.zero.sharded_init import initial_shard

GROUP = {"num_bits": 4, "group_size": 8, "group_dim": 1, "symmetric": False}
IDS = torch.arange(12).view(2, 6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.table(ids)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x)
        return found


def plain() -> nn.Module:
    """Return the model of rank 0 with the unpacked values of its packed weights."""
    torch.manual_seed(0)
    model = Model()
    init_group_wise_weight_quantization(model, config("post_init_quant", 0))
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear):
            model.set_submodule(name, module.to_linear())
        elif isinstance(module, PackedEmbedding):
            model.set_submodule(name, nn.Embedding.from_pretrained(module.weight))
    return model


def config(key: str, stage: int) -> dict[str, Any]:
    rules: dict[str, Any] = (
        GROUP if key == "quantized_initialization" else {"blocks": GROUP, "table": GROUP, "head": GROUP}
    )
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "weight_quantization": {key: rules},
    }


def run(key: str, stage: int, is_built_sharded: bool) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())  # ranks draw different values; the engine uses those of rank 0
    settings = config(key, stage)
    with windlass.zero.Init(config_dict_or_path=settings, enabled=is_built_sharded):
        model = Model()
    built = _held(model)
    engine = windlass.initialize(model=model, config=settings)[0]
    with torch.no_grad():
        out = engine(IDS)
    kinds = {name for name, module in engine.module.named_modules() if isinstance(module, PackedMatrix)}
    units = [unit for unit in engine._sharded.units if unit.dtype == torch.uint8]
    held = sum(u.shard_slot.numel if u.shard_slot is not None else u.local_shard.numel() for u in units)
    whole = sum(unit.layout.padded for unit in units)
    engine.destroy()
    return {"out": out, "kinds": kinds, "built": built, "held": held, "whole": whole}


def _held(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of parameters on this rank, and the bytes of the full parameters."""
    held = whole = 0
    for parameter in model.parameters():
        shard = initial_shard.find(parameter)
        held += (parameter.numel() if shard is None else shard.shard.numel()) * parameter.element_size()
        whole += parameter.numel() * parameter.element_size()
    return held, whole


@pytest.mark.parametrize(
    ("key", "stage", "is_built_sharded", "transport"),
    [
        ("quantized_initialization", 3, True, "shm"),
        ("post_init_quant", 3, True, "gloo"),
        pytest.param("post_init_quant", 3, False, "shm", marks=pytest.mark.slow),
        pytest.param("post_init_quant", 1, False, "gloo", marks=pytest.mark.slow),
    ],
)
def test_packed_weights_are_those_of_rank_0(key: str, stage: int, is_built_sharded: bool, transport: str) -> None:
    wanted = plain()
    with torch.no_grad():
        expected = wanted(IDS)
    for result in run_ranks(run, 2, key, stage, is_built_sharded, transport=transport):
        torch.testing.assert_close(result["out"], expected, rtol=1e-5, atol=1e-6)
        assert result["kinds"] == {"table", "head", *(f"blocks.{n}.{part}" for n in (0, 1) for part in ("up", "down"))}
        if stage == 3:
            assert 2 * result["held"] == result["whole"]
        if key == "quantized_initialization":
            held, whole = result["built"]
            assert 2 * held < whole + 100 and whole < 0.6 * 4 * sum(p.numel() for p in wanted.parameters())
