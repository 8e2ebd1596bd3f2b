"""Tests that only gradients of the modules named by torch_autocast are reduced in its dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import windlass
from tests.dist.equivalence_runs import whole_grads
from tests.dist.harness import RankError, run_ranks
from tests.models import Place, mlp, rows
from tests.oracle import relative_error

NAMES = ["torch.nn.Linear"]


def config(stage: int, names: list[str], **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "torch_autocast": {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": names},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "unit_merge_threshold": 10_000},
        **more,
    }


def reduced(stages: list[int], names: list[str]) -> list[dict[str, torch.Tensor | None]]:
    results = []
    for stage in stages:
        torch.manual_seed(0)
        engine = windlass.initialize(model=mlp(), config=config(stage, names))[0]
        engine.backward(engine(**rows(Place(0, 0, dist.get_rank()))))
        results.append(whole_grads(engine.module))
        engine.step()
        engine.destroy()
    return results


def plain(names: list[str], ranks: int) -> dict[str, torch.Tensor]:
    """Return the mean of the ranks' gradients. Gradients of the named modules are rounded before the sum."""
    torch.manual_seed(0)
    model = mlp()
    sums: dict[str, torch.Tensor] = {}
    own = {f"{n}.{p}" for n, m in model.named_modules() if isinstance(m, nn.Linear) for p, _ in m.named_parameters()}
    for rank in range(ranks):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**rows(Place(0, 0, rank)))
        loss.backward()
        for name, parameter in model.named_parameters():
            part = parameter.grad
            sent = part.bfloat16().float() if name in own and names and ranks > 1 else part
            sums[name] = sums.get(name, 0) + sent / ranks
            parameter.grad = None
    return sums


@pytest.mark.parametrize("names", [NAMES, []], ids=["linear", "none"])
def test_gradients_of_named_modules_are_reduced_in_the_autocast_dtype(names: list[str]) -> None:
    for ranks in (1, 2):
        expected = plain(names, ranks)
        for actual in run_ranks(reduced, ranks, [0, 1, 2, 3], names, transport="gloo"):
            for stage, gradients in enumerate(actual):
                for name, want in expected.items():
                    have = gradients[name]
                    assert have is not None and torch.allclose(have, want, rtol=1e-6, atol=1e-9), (stage, name)


def unknown() -> None:
    windlass.initialize(model=mlp(), config=config(1, ["torch.nn.Linea"]))


def test_unknown_class_name_is_refused() -> None:
    with pytest.raises(RankError, match=r"lower_precision_safe_modules: 'torch.nn.Linea' is not a class"):
        run_ranks(unknown, 1)


def bf16_rows(rank: int) -> dict[str, torch.Tensor]:
    return {name: value.bfloat16() for name, value in rows(Place(0, 0, rank)).items()}


def of_bf16_parameters(stage: int) -> tuple[float, torch.dtype, bool, float]:
    """Return this rank's loss, the dtype of its parameters, whether autocast was on, and the error of the gradients."""
    torch.manual_seed(0)
    engine = windlass.initialize(model=mlp(), config=config(stage, NAMES, bf16={"enabled": True}))[0]
    seen: list[bool] = []
    engine.module.head.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    loss = engine(**bf16_rows(dist.get_rank()))
    engine.backward(loss)
    means: dict[str, torch.Tensor] = {}
    for rank in range(dist.get_world_size()):
        torch.manual_seed(0)
        model = mlp().bfloat16()
        lowered_loss(model, rank).backward()
        for name, parameter in model.named_parameters():
            means[name] = means.get(name, 0) + parameter.grad.float() / dist.get_world_size()
    found = relative_error(whole_grads(engine.module), means)[0]
    dtype = next(engine.module.parameters()).dtype
    engine.destroy()
    return loss.item(), dtype, seen == [True], found


def lowered_loss(model: nn.Module, rank: int) -> torch.Tensor:
    """Return the loss of a model and inputs in bf16, under autocast."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss: torch.Tensor = model(**bf16_rows(rank))
    return loss


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_in_bf16_compute_under_autocast(stage: int) -> None:
    torch.manual_seed(0)
    model = mlp().bfloat16()
    for rank, (loss, dtype, lowered, error) in enumerate(run_ranks(of_bf16_parameters, 2, stage)):
        assert loss == lowered_loss(model, rank).item()
        assert dtype == torch.bfloat16
        assert lowered
        assert error < 1e-2
