"""Tests of buffer dtypes under 16-bit parameters: losses equal those of a model whose buffers are cast by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import windlass
from tests.dist.harness import run_ranks
from windlass.base.errors import CheckpointError

BF16, FP32 = torch.bfloat16, torch.float32


class Router(nn.Module):
    """Router with a bias that the model's `_keep_in_fp32_modules_strict` names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.register_buffer("correction_bias", torch.linspace(5.0, 5.01, 8))

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ self.weight
        return x + scores * (scores.float() + self.correction_bias.float()).softmax(-1).to(x.dtype)


class Rotated(nn.Module):
    """Model with three buffers: a table that is not saved, a scale and a count that are saved."""

    _keep_in_fp32_modules_strict = ("correction_*",)

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.out = nn.Linear(8, 8)
        self.register_buffer("table", torch.linspace(0.1, 3.0, 8).sin(), persistent=False)
        self.register_buffer("scale", torch.full((8,), 1.0 + 2**-9))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x = self.router(x) * self.table.to(x.dtype) + x * self.scale.to(x.dtype)
        return self.out(x).float().square().mean()


ROWS: list[tuple[dict[str, Any], dict[str, torch.dtype]]] = [
    ({}, {"router.correction_bias": FP32, "table": FP32, "scale": BF16}),
    ({"keep_in_fp32_modules": []}, {"router.correction_bias": BF16, "table": FP32, "scale": BF16}),
    ({"keep_in_fp32_modules": ["rout*bias", "scale"]}, {"router.correction_bias": FP32, "table": FP32, "scale": FP32}),
    ({"buffer_dtype": "bf16"}, {"router.correction_bias": FP32, "table": BF16, "scale": BF16}),
    ({"buffer_dtype": "fp32"}, {"router.correction_bias": FP32, "table": FP32, "scale": FP32}),
    (
        {"buffer_dtype": "bf16", "keep_in_fp32_modules": "table"},
        {"router.correction_bias": BF16, "table": FP32, "scale": BF16},
    ),
]


def batches(ranks: int) -> Tensor:
    return torch.randn(3, ranks, 4, 8, generator=torch.Generator().manual_seed(3)).to(BF16)


def trained(folder: str) -> list[Any]:
    results = []
    for number, (section, _) in enumerate(ROWS):
        for stage in (0, 3):
            torch.manual_seed(0)
            config = {
                "train_micro_batch_size_per_gpu": 4,
                "bf16": {"enabled": True},
                "data_types": section,
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                "gradient_clipping": 0.0,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            }
            engine = windlass.initialize(model=Rotated(), config=config)[0]
            losses = []
            for batch in batches(dist.get_world_size()):
                loss = engine(batch[dist.get_rank()])
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
            place = f"{folder}/{number}-{stage}"
            engine.save_checkpoint(place)
            engine.module.scale.zero_()
            engine.load_checkpoint(place)
            buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
            results.append((losses, buffers))
            engine.destroy()
    return results


def plain(dtypes: dict[str, torch.dtype], ranks: int) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model = Rotated()
    for name, dtype in dtypes.items():
        owner, _, own = name.rpartition(".")
        model.get_submodule(owner)._buffers[own] = model.get_buffer(name).to(dtype)
    masters = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(BF16)
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1)
    losses = []
    for batch in batches(ranks):
        for rank in range(ranks):
            loss = model(batch[rank])
            loss.backward()
            losses.append(float(loss.detach()))
            for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
                grad = parameter.grad.float() / ranks
                master.grad = grad if master.grad is None else master.grad + grad
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
                parameter.copy_(master)
    return losses, model


@pytest.mark.parametrize("ranks", [1, 2])
def test_buffers_have_the_configured_dtype(ranks: int, tmp_path: Path) -> None:
    of_ranks = run_ranks(trained, ranks, str(tmp_path), transport="gloo")
    for number, (section, dtypes) in enumerate(ROWS):
        expected, model = plain(dtypes, ranks)
        for stage in (0, 1):
            for rank, actual in enumerate(of_ranks):
                losses, buffers = actual[2 * number + stage]
                assert losses == pytest.approx(expected[rank::ranks], rel=2e-3), section
                for name, buffer in model.named_buffers():
                    assert buffers[name].dtype == buffer.dtype, (section, name)
                    assert torch.equal(buffers[name], buffer), (section, name)


class Meshed(nn.Module):
    """Model with sparse buffers, one of them in two modules, and an expanded one. Ranks have different values."""

    def __init__(self) -> None:
        super().__init__()
        graph = (torch.rand(8, 8) > 0.4 + 0.2 * dist.get_rank()).float()
        self.register_buffer("coordinates", graph.to_sparse(), persistent=False)
        self.register_buffer("rows", graph.to_sparse_csr(), persistent=False)
        self.register_buffer("expanded", torch.rand(8, 1).expand(8, 3), persistent=False)
        self.out = nn.Linear(8, 8)
        self.out.register_buffer("rows", self.rows, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = (self.coordinates @ x.t()).t() + (self.out.rows @ x.t()).t()
        return self.out(mixed + self.expanded.sum(-1)).square().mean()


def sparse(stage: int) -> list[Any]:
    torch.manual_seed(dist.get_rank())
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    model = Meshed()
    first = [tensor.to_dense() for tensor in (model.coordinates, model.rows, model.expanded)]
    engine = windlass.initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))[0]
    loss = engine(torch.ones(2, 8))
    engine.backward(loss)
    engine.step()
    found = [tensor.to_dense() for tensor in (model.coordinates, model.rows, model.expanded)]
    assert model.rows is model.out.rows
    engine.destroy()
    return [first, found, float(loss)]


@pytest.mark.parametrize("stage", [0, 3])
def test_sparse_and_expanded_buffers_are_those_of_rank_0(stage: int) -> None:
    ranks = run_ranks(sparse, 2, stage)
    for _, found, loss in ranks:
        assert all(torch.equal(a, b) for a, b in zip(found, ranks[0][0], strict=True))
        assert loss == pytest.approx(ranks[0][2], rel=1e-6)


class Split(nn.Module):
    """Model of two layers for tensor parallelism, with a sparse buffer and an expanded one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        graph = (torch.rand(8, 8) > 0.4 + 0.2 * dist.get_rank()).float()
        self.register_buffer("graph", graph.to_sparse())
        self.register_buffer("expanded", torch.rand(8, 1).expand(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        mixed = (self.graph @ x.t()).t() + self.expanded.sum(-1)
        return self.down(self.up(mixed)).square().mean()


def split(folder: str) -> tuple[list[Tensor], list[Tensor], float, list[str]]:
    torch.manual_seed(dist.get_rank())
    model = Split()
    first = [model.graph.to_dense(), model.expanded.clone()]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "parallel": {"tp": 2, "tensor_table": {"up": "column", "down": "row"}},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine = windlass.initialize(model=model, config=config)[0]
    loss = engine(torch.ones(2, 8))
    engine.backward(loss)
    engine.step()
    found = [model.graph.to_dense(), model.expanded.clone()]
    refusals = []
    for save in (engine.save_checkpoint, engine.save_16bit_model):
        try:
            save(folder)
        except CheckpointError as error:
            refusals.append(str(error))
    engine.destroy()
    return first, found, float(loss), refusals


def test_sparse_and_expanded_buffers_of_a_sharded_model_are_those_of_rank_0(tmp_path: Path) -> None:
    ranks = run_ranks(split, 2, str(tmp_path))
    for _, found, loss, refusals in ranks:
        assert all(torch.equal(a, b) for a, b in zip(found, ranks[0][0], strict=True))
        assert loss == pytest.approx(ranks[0][2], rel=1e-6)
        # A checkpoint has no sparse tensors. All ranks raise, and name the buffer.
        assert len(refusals) == 2
        assert all("'graph' is a buffer of the layout torch.sparse_coo" in text for text in refusals)


class Growing(nn.Module):
    """Model that enlarges a buffer for a longer input, as models with dynamic rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(2, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.table):
            self.table = torch.full((len(x), 4), 1.0 + dist.get_rank())
        with torch.no_grad():
            shift = self.table[: len(x)] * 2
        return (self.out(x) + shift).square().mean()


def grown(stage: int) -> tuple[Tensor, float]:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine = windlass.initialize(model=Growing(), config=config)[0]
    loss = torch.zeros(())
    for step in range(3):
        if step == 1:
            engine.eval()
            with torch.inference_mode():
                engine(torch.ones(6, 4))
            engine.train()
        loss = engine(torch.ones(2, 4))
        engine.backward(loss)
        engine.step()
    found = engine.module.table.clone()
    engine.destroy()
    return found, float(loss)


@pytest.mark.parametrize("stage", [0, 3])
def test_buffer_of_an_evaluation_in_inference_mode_is_synchronized(stage: int) -> None:
    for table, loss in (ranks := run_ranks(grown, 2, stage)):
        assert torch.equal(table, torch.ones(6, 4)) and not table.is_inference()
        assert loss == pytest.approx(ranks[0][1], rel=1e-6)
