"""Tests of optimizers whose `eval()` exchanges the weights for an evaluation: results equal plain torch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import windlass
from tests.dist.harness import run_ranks
from tests.dist.test_offload import offload_to


class ScheduleFree(torch.optim.Optimizer):
    """SGD that steps a sequence z, trains at a point between z and its average, and evaluates the average."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "steps": 0, "train_mode": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"]
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, 1 / group["steps"])
                    p.sub_(p.grad, alpha=group["lr"] * (1 - group["beta"] * (1 - 1 / group["steps"])))
                    z.sub_(p.grad, alpha=group["lr"])

    def train(self) -> None:
        """Move the weights to the point where gradients are computed."""
        self._exchange(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        """Move the weights to the average."""
        self._exchange(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def _exchange(self, train: bool, weight: Any) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train:
                group["train_mode"] = train
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight(group["beta"]))


class CallsItself(ScheduleFree):
    """Optimizer whose methods call each other, and take an argument."""

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        """Set the mode."""
        super().train() if mode else super().eval()

    def eval(self) -> None:
        """Set the other mode."""
        self.train(False)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.train(True)
        super().step(closure)


class Swapping(ScheduleFree):
    """Optimizer that stores the averages of its weights, and swaps them with the weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])
                    self.state[p].setdefault("average", torch.zeros_like(p)).lerp_(p, 0.5)

    @torch.no_grad()
    def _exchange(self, train: bool, weight: Any) -> None:
        if self.__dict__.get("trains", True) != train:
            self.trains = train
            for p in [p for group in self.param_groups for p in group["params"] if self.state[p]]:
                now = p.clone()
                p.copy_(self.state[p]["average"])
                self.state[p]["average"].copy_(now)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 5)
        self.last.weight = nn.Parameter(self.first.weight.detach().t().clone())
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(3))
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.last(self.first(x).tanh()) * self.scale).square().mean()
        return out


def batch(number: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * number + rank))


def losses_of(model: Any, optimizer: Any, step: Any, ranks: list[int]) -> list[float]:
    """Train four steps, evaluate after each second one, and return the means of all losses."""
    found = []
    for number in range(4):
        optimizer.train()
        optimizer.train()
        found.append(step([batch(number, rank) for rank in ranks]))
        if number % 2:
            optimizer.eval()
            with torch.no_grad():
                found.append(float(sum(model(batch(9, rank)) for rank in (0, 1)) / 2))
    return found


def run(kind: type[ScheduleFree], stage: int, tier: str, inner: bool, folder: str) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    model = Net()
    plain, rank = copy.deepcopy(model), dist.get_rank()
    own, reference = kind(p for p in model.parameters() if p.requires_grad), kind(plain.parameters())
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **dict(offload_to(tier, "none", folder))}
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.0, "zero_optimization": zero}
    engine, optimizer, *_ = windlass.initialize(model=model, optimizer=own, config=config)

    def step(batches: list[torch.Tensor]) -> float:
        loss = engine(batches[0])
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def plain_step(batches: list[torch.Tensor]) -> float:
        loss = torch.stack([plain(one) for one in batches]).mean()
        loss.backward()
        reference.step()
        reference.zero_grad()
        return float(loss)

    found = losses_of(engine, own if inner else optimizer, step, [rank])
    expected = losses_of(plain, reference, plain_step, list(range(dist.get_world_size())))
    for (name, weight), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            windlass.zero.full_param(weight), other.detach(), msg=lambda text, name=name: f"{name}: {text}"
        )
    assert own.param_groups[0]["train_mode"] == reference.param_groups[0]["train_mode"]
    engine.destroy()
    return found, expected


@pytest.mark.parametrize("inner", [False, True], ids=["engine's", "own"])
@pytest.mark.parametrize(("stage", "tier"), [(0, "none"), (1, "none"), (2, "cpu"), (2, "nvme"), (3, "none")])
@pytest.mark.parametrize("kind", [ScheduleFree, CallsItself, Swapping])
def test_evaluations_and_training_equal_plain_torch(
    kind: type[ScheduleFree], stage: int, tier: str, inner: bool, tmp_path: Any
) -> None:
    for found, expected in run_ranks(run, 2, kind, stage, tier, inner, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-5)
