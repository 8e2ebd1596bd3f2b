"""Tests that PowerSGD equals SGD bitwise before `start_step`, and afterwards torch's communication hook for
DistributedDataParallel. Tests of its bytes and of resumed runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import windlass
from tests.dist.equivalence_runs import specimen, start, whole_params
from tests.dist.harness import RankError, run_ranks
from tests.dist.test_one_bit_adam import Case, errors_of, resume, save, train
from tests.oracle import relative_error
from windlass.optim.power_sgd import thin_columns
from windlass.zero.update.power_sgd_update import OPERATION, WARM_START

RANK, LR, MOMENTUM = 2, 0.05, 0.9
BASE = Case(optimizer="PowerSGD", steps=5)


def config(case: Case, **more: Any) -> dict[str, Any]:
    params = {"lr": LR, "momentum": MOMENTUM, "rank": RANK, "start_step": 0, **more}
    return {**Case.config(case), "optimizer": {"type": "PowerSGD", "params": params}}


def test_thin_matrices_are_used_where_they_are_smaller() -> None:
    group = {"rank": 4, "min_compression_rate": 2.0}
    shapes = [(64, 64), (64, 2, 32), (8, 64), (64,), (), (3, 1000), (0, 4)]
    assert [thin_columns(torch.Size(shape), group) for shape in shapes] == [4, 4, 0, 0, 0, 0, 0]
    assert thin_columns(torch.Size((3, 1000)), {"rank": 1, "min_compression_rate": 1.0}) == 1


class Bucket:
    """All gradients of a model, as DistributedDataParallel passes them to its hook."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._flat = torch.zeros(sum(p.numel() for p in self._parameters))

    def fill(self) -> None:
        torch.cat([p.grad.reshape(-1) for p in self._parameters if p.grad is not None], out=self._flat)

    def give_back(self) -> None:
        for parameter, gradient in zip(self._parameters, self.gradients(), strict=True):
            parameter.grad = gradient.clone()

    def gradients(self) -> list[torch.Tensor]:
        parts = self._flat.split([p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]

    def buffer(self) -> torch.Tensor:
        return self._flat

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def with_hook(steps: int, transport: str = "shm") -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """Train with torch's hook and with the engine from the same Q. Return both parameters, and the engine's bytes."""

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))

    def batch(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        return torch.randn(8, 24, generator=generator)

    model = build()
    bucket: Any = Bucket(model)
    state = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for step in range(steps):
        model(batch(step)).square().mean().backward()
        bucket.fill()
        powerSGD_hook(state, bucket).wait()
        bucket.give_back()
        optimizer.step()
        optimizer.zero_grad()
    ours = build()
    engine: Any = windlass.initialize(model=ours, config=config(Case(transport=transport), start_step=2))[0]
    for step in range(steps):
        if step == 2:
            # the first Q of torch's hook: `PowerSGDState.random_seed` is 0
            torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
            first, update = torch.randn(1, 24, RANK), engine._sharded.update
            update._phase.begin()
            (warm,) = (one for one in update.rank_states() if one.key == WARM_START and one.name == "0.weight")
            warm.values[: first.numel()] = torch.linalg.qr(first[0])[0].reshape(-1)
        engine.backward(engine(batch(step)).square().mean())
        engine.step()
    moved = int(engine.report()["bytes_moved"][OPERATION])
    found = ({n: p.detach() for n, p in model.named_parameters()}, whole_params(engine.module), moved)
    engine.destroy()
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_equal_those_of_the_hook_of_torch(ranks: int) -> None:
    require_hook(run_ranks(with_hook, ranks, 7, timeout=40.0))


def require_hook(by_rank: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]]) -> None:
    """Check parameters and bytes of `with_hook`."""
    ranks = len(by_rank)
    for theirs, ours, moved in by_rank:
        error, where = relative_error(ours, theirs)
        assert error <= 1e-6, f"{where} is off by {error:.2e}"
        thin, rest = RANK * (32 + 24), 32 + 3 * 32 + 3
        first, second = RANK * 32 + rest, RANK * 24
        assert thin + rest == first + second
        assert moved == 2 * (ranks - 1) * 4 * first // ranks + 2 * (ranks - 1) * 4 * second // ranks


def both(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    found = []
    for kind, more in (("PowerSGD", {"rank": RANK, "start_step": 5}), ("SGD", {})):
        params = {"lr": LR, "momentum": MOMENTUM, **more}
        engine = start(specimen(name), {**BASE.config(), "optimizer": {"type": kind, "params": params}})
        train(engine, BASE, 0, 3)
        found.append(whole_params(engine.module))
        engine.destroy()
    return found[0], found[1]


def test_equals_sgd_bit_for_bit_before_start_step() -> None:
    for one, other in run_ranks(both, 2, "mlp"):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


RESUMED = replace(BASE, params=(("rank", RANK), ("start_step", 2), ("momentum", MOMENTUM)))


def as_sgd(function: Any, case: Case, folder: str, at: int) -> dict[str, Any]:
    """Run `save` or `resume` with hyper-parameters of SGD."""

    class Renamed(Case):
        def config(self, folder: str = "") -> dict[str, Any]:
            return config(self, **dict(self.params))

    result: dict[str, Any] = function(Renamed(**vars(case)), folder, at)
    return result


def test_a_resumed_run_is_exact(tmp_path: Path) -> None:
    straight = run_ranks(as_sgd, 2, save, RESUMED, str(tmp_path), 4)
    resumed = run_ranks(as_sgd, 2, resume, RESUMED, str(tmp_path), 4)
    for here, there in zip(straight, resumed, strict=True):
        assert any(name.endswith(WARM_START) for name in here["errors"])
        for what in ("params", "errors"):
            assert here[what].keys() == there[what].keys()
            assert all(torch.equal(value, there[what][name]) for name, value in here[what].items()), what


def sums(steps: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train `steps` steps with matrices of rank 1. Return this process's parameters and error feedback."""
    engine = start(specimen("mlp"), config(BASE, rank=1))
    train(engine, BASE, 0, steps)
    replicas, errors = {n: p.detach().clone() for n, p in engine.module.named_parameters()}, errors_of(engine)
    engine.destroy()
    return replicas, errors


def test_replicas_stay_equal_and_errors_differ() -> None:
    (one, own), (other, theirs) = run_ranks(sums, 2, 4)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert any(not torch.equal(value, theirs[name]) for name, value in own.items() if name.endswith("worker_error"))
    assert all(torch.equal(value, theirs[name]) for name, value in own.items() if name.endswith(WARM_START))


def refused(stage: int, more: dict[str, Any]) -> None:
    start(specimen("mlp"), config(replace(BASE, stage=stage), **more))


@pytest.mark.parametrize(
    ("stage", "more", "text"),
    [(1, {}, r"PowerSGD.* at zero_optimization.stage 1.*write stage 0"), (0, {"rank": 0}, "rank")],
)
def test_unsupported_options_of_power_sgd_are_refused(stage: int, more: dict[str, Any], text: str) -> None:
    with pytest.raises(RankError, match=f"(?s){text}"):
        run_ranks(refused, 1, stage, more)
