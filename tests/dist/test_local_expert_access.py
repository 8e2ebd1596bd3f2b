"""Tests of experts with different numbers on each rank: each rank reads and sets its own experts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.dist.harness import run_ranks
from tests.oracle import relative_error
from windlass.parallel.experts import MixtureOfExperts, StackedMLP

WIDTH, EXPERTS, LR = 8, 3, 1e-2
BOUND = 1e-5
Tensors = dict[str, Tensor]


class Net(nn.Module):
    """Three experts as modules and three stacked experts between dense layers."""

    def __init__(self) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.apart = MixtureOfExperts(WIDTH, expert, EXPERTS, k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
        self.stacked = MixtureOfExperts(WIDTH, StackedMLP(WIDTH, 12, EXPERTS), EXPERTS, k=1, drop_tokens=False)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden, item, _ = self.apart(self.first(x))
        hidden, other, _ = self.stacked(hidden)
        return self.last(hidden).square().mean() + 0.01 * (item + other)


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def batch(rank: int) -> Tensor:
    return torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(70 + rank))


def config(stage: int, zero: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 9,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "parallel": {"ep": 2},
    }


def read_all(stage: int, zero: dict[str, Any]) -> list[Tensors]:
    """Return gradients before a step, then parameters and moments after it, read by a loop over local parameters."""
    import windlass
    from windlass.zero import GatheredParameters, full_grad, full_param, full_state

    engine: Any = windlass.initialize(model=net(), config=config(stage, zero))[0]
    engine.backward(engine(batch(dist.get_rank())))
    own = list(engine.module.named_parameters())
    gradients = {name: full_grad(parameter) for name, parameter in own}
    engine.step()
    moments = {name: full_state(parameter, "exp_avg") for name, parameter in own}
    parameters = {}
    for name, parameter in own:
        with GatheredParameters(parameter):
            parameters[name] = parameter.detach().clone()
        if ".experts." not in name or parameter.dim() < 3:
            assert torch.equal(full_param(parameter).detach(), parameters[name])
        else:
            parameters[name] = full_param(parameter).detach()
    engine.destroy()
    return [gradients, moments, parameters]


@cache
def expected(ranks: int) -> list[Tensors]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    torch.stack([model(batch(rank)) for rank in range(ranks)]).mean().backward()
    named = dict(model.named_parameters())
    gradients = {name: parameter.grad.clone() for name, parameter in named.items() if parameter.grad is not None}
    optimizer.step()
    moments = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in named.items()}
    return [gradients, moments, {name: parameter.detach() for name, parameter in named.items()}]


def check(seen: list[list[Tensors]], ranks: int) -> None:
    for number, requested in enumerate(expected(ranks)):
        results: Tensors = {}
        for of_rank in seen:
            for name, value in of_rank[number].items():
                assert name not in results or torch.equal(results[name], value), name
                results[name] = value
        assert results.keys() == requested.keys()
        error, where = relative_error(results, requested)
        assert error <= BOUND, (number, where, error)


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 2), (2, 4), (3, 2), (3, 4)])
def test_each_rank_reads_its_experts(stage: int, ranks: int, transport: str) -> None:
    seen = run_ranks(read_all, ranks, stage, {}, transport=transport)
    assert len(seen[0][0]) > len(seen[1][0])  # two experts on rank 0, one on rank 1
    check(seen, ranks)


def test_each_rank_reads_its_offloaded_experts(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    check(run_ranks(read_all, 2, 3, {"offload_param": disk, "offload_optimizer": disk}), 2)
    late = {"offload_optimizer": {"device": "cpu", "delayed_update": True}}
    check(run_ranks(read_all, 2, 2, late), 2)


def set_all(stage: int) -> None:
    """Set values of experts on the ranks that have these experts, and train a step from the values."""
    import windlass
    from windlass.zero import (
        GatheredParameters,
        full_grad,
        full_param,
        full_state,
        set_full_grad,
        set_full_param,
        set_full_state,
    )

    engine: Any = windlass.initialize(model=net(), config=config(stage, {}))[0]
    experts = {n: p for n, p in engine.module.named_parameters() if "deepspeed_experts" in n}
    for name, parameter in experts.items():
        set_full_param(parameter, torch.full(parameter.shape, 0.1 * int(name.split("deepspeed_experts.")[1][0])))
    x = batch(dist.get_rank())
    engine.backward(engine(x))
    for parameter in experts.values():
        set_full_grad(parameter, torch.ones(parameter.shape))
        assert torch.equal(full_grad(parameter), torch.ones(parameter.shape))
    engine.step()
    for name, parameter in experts.items():
        start = 0.1 * int(name.split("deepspeed_experts.")[1][0])
        torch.testing.assert_close(full_param(parameter).detach(), torch.full(parameter.shape, start - LR))
        set_full_state(parameter, "exp_avg", torch.zeros(parameter.shape))
        assert full_state(parameter, "exp_avg").abs().max() == 0
        with GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
            parameter.fill_(2.0)
        assert torch.equal(full_param(parameter).detach(), torch.full(parameter.shape, 2.0))
    engine(x)  # a forward of all ranks, after loops of unequal length
    engine.destroy()
    assert all(bool((parameter == 2.0).all()) for parameter in experts.values())


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (2, 2), (3, 4)])
def test_each_rank_sets_its_experts(stage: int, ranks: int) -> None:
    run_ranks(set_all, ranks, stage, transport="gloo")


def split_unequally() -> str:
    import windlass
    from windlass.base.errors import ModelError

    torch.manual_seed(3)
    wide = nn.Sequential(nn.Linear(WIDTH, 40_000), nn.Tanh(), nn.Linear(40_000, WIDTH))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model.add_module("mixture", MixtureOfExperts(WIDTH, wide, EXPERTS))
    try:
        windlass.initialize(model=model, config=config(3, {"stage3_max_live_parameters": 0}))
    except ModelError as error:
        return str(error)
    return ""


def test_experts_with_different_units_per_rank_are_refused() -> None:
    """Experts that would form different units on each rank are refused.

    One expert has fewer elements than the limit above which a block is split; two experts have more.
    """
    text = run_ranks(split_unequally, 2)
    assert text[0] == text[1] and "stage3_max_live_parameters" in text[0] and "split a block" in text[0]
