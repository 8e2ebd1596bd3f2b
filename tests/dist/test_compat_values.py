"""Tests of `safe_get_full_*`, `safe_set_full_*` and engines with DeepSpeed's optimizer classes, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.harness import run_ranks

STEPS, RANKS = 3, 2
KINDS = ("FusedAdam", "DeepSpeedCPUAdam", "FusedLion", "DeepSpeedCPUAdagrad", "FusedLamb")


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3), nn.Linear(3, 3))
    net[3].requires_grad_(False)
    return net


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def make(kind: str, parameters: Any) -> torch.optim.Optimizer:
    from windlass.compat.optimizers import deepspeed_cpu_optimizers, fused_optimizers

    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "FusedAdam": lambda p: fused_optimizers.FusedAdam(p, lr=1e-2, weight_decay=0.1, adam_w_mode=False),
        "DeepSpeedCPUAdam": lambda p: deepspeed_cpu_optimizers.DeepSpeedCPUAdam(p, lr=1e-2, weight_decay=0.1),
        "FusedLion": lambda p: fused_optimizers.FusedLion(p, lr=1e-3, weight_decay=0.1),
        "DeepSpeedCPUAdagrad": lambda p: deepspeed_cpu_optimizers.DeepSpeedCPUAdagrad(p, lr=1e-2),
        "FusedLamb": lambda p: fused_optimizers.FusedLamb(p, lr=1e-2),
    }
    return makers[kind](parameters)


def plain(kind: str, parameters: Any) -> torch.optim.Optimizer:
    from windlass.optim import Lamb, Lion

    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "FusedAdam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
        "DeepSpeedCPUAdam": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        "FusedLion": lambda p: Lion(p, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1),
        "DeepSpeedCPUAdagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
        "FusedLamb": lambda p: Lamb(p, lr=1e-2),
    }
    return makers[kind](parameters)


def trained(stage: int, kind: str) -> dict[str, Any]:
    """Train under the engine. Return each step's gradients, and other values of every parameter after training."""
    import torch.distributed as dist

    import windlass
    from windlass.compat import tensor_fragment_api as whole

    net = model()
    optimizer = make(kind, [p for p in net.parameters() if p.requires_grad])
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, "gradient_clipping": 0.0}
    engine = windlass.initialize(model=net, optimizer=optimizer, config=config)[0]
    named = dict(net.named_parameters())
    key = "sum" if kind == "DeepSpeedCPUAdagrad" else "exp_avg"
    early = [whole.safe_get_full_optimizer_state(p, key) is None for p in named.values()]
    gradients = []
    for step in range(STEPS):
        engine.backward(loss_of(engine(batch(dist.get_rank(), step))))
        gradients.append({name: whole.safe_get_full_grad(p) for name, p in named.items()})
        engine.step()
    results = {
        "early": early,
        "gradients": gradients,
        "weights": {name: whole.safe_get_full_fp32_param(p) for name, p in named.items()},
        "states": {name: whole.safe_get_full_optimizer_state(p, key) for name, p in named.items()},
        "after": {name: whole.safe_get_full_grad(p) for name, p in named.items()},
        "graph": whole.safe_get_full_fp32_param(named["0.weight"]).requires_grad,  # type: ignore[union-attr]
    }
    engine.destroy()
    return results


def plain_results(kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, Tensor]]]:
    """Train in one process on all ranks' data.

    Return final weights, the first optimizer state of each parameter, and each step's gradients.
    """
    net = model()
    optimizer = plain(kind, [p for p in net.parameters() if p.requires_grad])
    gradients = []
    for step in range(STEPS):
        (sum(loss_of(net(batch(rank, step))) for rank in range(RANKS)) / RANKS).backward()  # type: ignore[union-attr]
        gradients.append({n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    key = "sum" if kind == "DeepSpeedCPUAdagrad" else "exp_avg"
    states = {n: optimizer.state[p][key] for n, p in net.named_parameters() if p.requires_grad}
    return {n: p.detach() for n, p in net.named_parameters()}, states, gradients


@pytest.mark.parametrize(
    ("stage", "kind"),
    [(0, "FusedAdam"), (1, "DeepSpeedCPUAdam"), (2, "FusedLion"), (3, "FusedAdam")]
    + [pytest.param(3, kind, marks=pytest.mark.slow) for kind in KINDS[1:]]
    + [pytest.param(2, kind, marks=pytest.mark.slow) for kind in ("FusedAdam", "DeepSpeedCPUAdagrad")],
)
def test_values_and_steps_equal_plain_torch(stage: int, kind: str) -> None:
    weights, states, gradients = plain_results(kind)
    for rank in run_ranks(trained, RANKS, stage, kind):
        assert all(rank["early"]), "there is no state before the first step"
        assert not rank["graph"]
        for name, value in weights.items():
            if name.startswith("3."):  # the frozen layer
                assert rank["weights"][name] is None and rank["states"][name] is None
                assert all(seen[name] is None for seen in rank["gradients"])
                continue
            torch.testing.assert_close(rank["weights"][name], value)
            torch.testing.assert_close(rank["states"][name], states[name])
            for seen, expected in zip(rank["gradients"], gradients, strict=True):
                torch.testing.assert_close(seen[name], expected[name])
            assert rank["after"][name] is None, "a step empties gradients"


def edited(stage: int) -> dict[str, Any]:
    """Set each kind of value, as a full tensor and as this rank's shard, and read it back."""
    import torch.distributed as dist

    import windlass
    from windlass.compat import tensor_fragment_api as whole

    net = model()
    optimizer = make("FusedAdam", [p for p in net.parameters() if p.requires_grad])
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.0}
    engine = windlass.initialize(model=net, optimizer=optimizer, config=config)[0]
    target, other, frozen = net[0].weight, net[2].weight, net[3].weight
    shape = torch.arange(60.0).view(10, 6)
    for _ in range(2):
        engine.backward(loss_of(engine(batch(dist.get_rank(), 0))))
        before = whole.safe_get_full_grad(other)
        whole.safe_set_full_grad(target, shape)
        whole.safe_update_full_grad_vectorized(list(net.parameters()), lambda gradient, _: 2 * gradient)
        gradients = whole.safe_get_full_grad(target), whole.safe_get_full_grad(other), before
        engine.step()
    whole.safe_set_full_fp32_param(target, shape + 1)
    # a frozen parameter has no master weight, so nothing is set
    whole.safe_set_full_fp32_param(frozen, torch.ones(3, 3))
    whole.safe_set_full_optimizer_state(target, shape + 2, "exp_avg")
    read = whole.safe_get_full_fp32_param(target), whole.safe_get_full_optimizer_state(target, "exp_avg")
    piece = whole.safe_get_local_fp32_param(target)
    assert piece is not None
    whole.safe_set_local_fp32_param(target, torch.full_like(piece, 5.0))
    state = whole.safe_get_local_optimizer_state(target, "exp_avg")
    if state is not None:
        whole.safe_set_local_optimizer_state(target, torch.full_like(state, 6.0), "exp_avg")
    again = whole.safe_get_full_fp32_param(target), whole.safe_get_full_optimizer_state(target, "exp_avg")
    engine.destroy()
    return {"gradients": gradients, "read": read, "again": again}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_values_can_be_set(stage: int) -> None:
    shape = torch.arange(60.0).view(10, 6)
    for rank in run_ranks(edited, RANKS, stage):
        own, others, before = rank["gradients"]
        assert torch.equal(own, 2 * shape) and torch.equal(others, 2 * before)
        assert torch.equal(rank["read"][0], shape + 1) and torch.equal(rank["read"][1], shape + 2)
        assert torch.equal(rank["again"][0], torch.full_like(shape, 5.0))
        assert torch.equal(rank["again"][1], torch.full_like(shape, 6.0))


def test_safe_get_and_set_without_an_engine() -> None:
    from windlass.compat import tensor_fragment_api as whole

    layer = nn.Linear(2, 2)
    assert whole.safe_get_full_fp32_param(layer.weight) is None
    assert whole.safe_get_full_optimizer_state(layer.weight, "exp_avg") is None
    assert whole.safe_get_full_grad(layer.weight) is None
    layer.weight.grad = torch.ones(2, 2)
    whole.safe_set_full_grad(layer.weight, torch.full((2, 2), 3.0))
    result = whole.safe_get_full_grad(layer.weight)
    assert result is layer.weight.grad and torch.equal(result, torch.full((2, 2), 3.0))
