"""What DeepSpeed's own tests ask of an engine beyond its members: bad steps, no optimizer, one rank."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tests.dist.harness import run_ranks


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def _config(stage: int, **others: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **others,
    }


def _bad_step(stages: list[int]) -> None:
    from windlass.compat.initialize import initialize
    from windlass.zero import full_param

    for stage in stages:
        schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
        engine, optimizer, _, scheduler = initialize(model=_net(), config=_config(stage, scheduler=schedule))
        x = torch.ones(2, 6)
        before = [full_param(parameter).clone() for parameter in engine.module.parameters()]
        engine.backward(engine(x * (math.nan if engine.global_rank else 1.0)).mean())
        engine.step()  # one rank's batch was bad: all leave the step out, and none raises
        assert not engine.was_step_applied() and optimizer.overflow
        assert (engine.skipped_steps, engine.global_steps) == (1, 1)
        assert engine.get_global_grad_norm() == math.inf and scheduler.last_batch_iteration == -1
        after = [full_param(parameter) for parameter in engine.module.parameters()]
        assert all(map(torch.equal, before, after))
        engine.backward(engine(x).mean())
        engine.step()
        assert engine.was_step_applied() and not optimizer.overflow and scheduler.last_batch_iteration == 0
        assert math.isfinite(engine.get_global_grad_norm())
        engine.destroy()


def test_a_step_whose_gradient_is_not_finite_is_skipped() -> None:
    """Law: as in DeepSpeed; windlass's own engine raises there."""
    run_ranks(_bad_step, 2, [0, 3])
