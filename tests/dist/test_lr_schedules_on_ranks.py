"""Tests that the learning rate at each optimizer step is that of one process, for any world and accumulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import oracle
from tests.dist.equivalence_runs import Setting, ds_config, specimen
from tests.dist.harness import run_ranks
from tests.models import Place, cast
from tests.oracle import Recipe

STEPS = 6
LR = 0.4


def torch_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3)
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer, [warm, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)], milestones=[3]
    )


def rates(way: str, accumulation: int, setting: Setting, precision: str, overflow_at: int | None) -> dict[str, Any]:
    """Return the learning rates before each update, from `get_lr` and from the optimizer's groups, and counters."""
    import windlass

    subject, rank = specimen("mlp"), dist.get_rank()
    recipe = Recipe(accumulation=accumulation, precision=precision, optimizer_params=(("lr", LR),))
    config = ds_config(recipe, setting)
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    model = oracle.build(subject, rank)
    more: dict[str, Any] = {}
    if way == "instance":
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        more = {"optimizer": optimizer, "lr_scheduler": torch_scheduler(optimizer)}
        del config["optimizer"]
    elif way == "callable":
        more = {"lr_scheduler": torch_scheduler}
    elif way == "name":
        config["scheduler"] = {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}
    else:
        params = {"warmup_min_lr": 0.0, "warmup_max_lr": LR, "warmup_num_steps": 4, "warmup_type": "linear"}
        config["scheduler"] = {"type": "WarmupLR", "params": params}
    engine, _, _, scheduler = windlass.initialize(model=model, config=config, **more)
    assert scheduler is engine.lr_scheduler and scheduler is not None
    seen, applied = [], []
    for step in range(STEPS):
        for micro in range(accumulation):
            batch = cast(subject.batch(Place(step, micro, rank)), recipe.dtype)
            loss = engine(**batch)
            # a finite loss whose gradients overflow 16 bits, on one rank and one micro-batch only
            engine.backward(loss * 1e9 if step == overflow_at and micro == rank == 0 else loss)
            before = engine.get_lr()
            in_group = [group["lr"] for group in engine.optimizer.param_groups]
            engine.step()
        seen.append((before, in_group))
        applied.append(engine.was_step_applied())
    results = {"rates": seen, "applied": applied, "skipped": engine.skipped_steps, "steps": engine.global_steps}
    engine.destroy()
    return results


def plain_rates(way: str, skipped: set[int]) -> list[float]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([parameter], lr=LR)
    if way == "name":
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    elif way == "config":
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, max(0, step - 1) / 4))
    else:
        scheduler = torch_scheduler(optimizer)
    seen = []
    for step in range(STEPS):
        seen.append(optimizer.param_groups[0]["lr"])
        if step not in skipped:
            optimizer.step()
            scheduler.step()
    return seen


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("way", ["instance", "callable", "name", "config"])
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (2, 3), (4, 1)])
def test_rate_of_every_step(way: str, ranks: int, accumulation: int) -> None:
    stage = {1: 0, 2: 3, 4: 2}[ranks]
    expected = plain_rates(way, set())
    for actual in run_ranks(rates, ranks, way, accumulation, Setting(stage=stage), "fp32", None):
        assert actual["applied"] == [True] * STEPS
        for step, (rate, group) in enumerate(actual["rates"]):
            assert rate == pytest.approx([expected[step]], rel=1e-6), f"get_lr at step {step}"
            assert group == pytest.approx([expected[step]], rel=1e-6), f"param_groups at step {step}"


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("way", ["callable", "config"])
def test_a_skipped_step_does_not_advance_the_schedule(way: str, stage: int) -> None:
    expected = plain_rates(way, {2})
    for actual in run_ranks(rates, 2, way, 2, Setting(stage=stage), "fp16", 2):
        assert actual["applied"] == [step != 2 for step in range(STEPS)]
        assert actual["skipped"] == 1 and actual["steps"] == STEPS
        for step, (rate, _) in enumerate(actual["rates"]):
            assert rate == pytest.approx([expected[step]], rel=1e-6), f"step {step}"


class Decay:
    """Rule with a state of its own, which a schedule saves."""

    def __init__(self) -> None:
        self.factor = 0.5

    def __call__(self, step: int) -> float:
        return self.factor**step


def resumed_with_two_rules(folder: str) -> tuple[list[float], list[float]]:
    """Return the rates of a run, and those of a run resumed from it, whose groups have rules of different kinds."""
    import windlass

    found = []
    for resumes in (False, True):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD([{"params": list(layer.parameters())} for layer in model], lr=LR)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [Decay(), lambda step: 1.0 / (1 + step)])
        config = ds_config(Recipe(), Setting(stage=1))
        del config["optimizer"]
        engine = windlass.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]
        if resumes:
            engine.load_checkpoint(folder)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
            if not resumes and engine.global_steps == 1:
                engine.save_checkpoint(folder)
        found.append(engine.get_lr())
        engine.destroy()
    return found[0], found[1]


def test_schedule_whose_groups_have_rules_of_different_kinds_resumes(tmp_path: Path) -> None:
    for first, resumed in run_ranks(resumed_with_two_rules, 2, str(tmp_path)):
        assert first == pytest.approx([LR * 0.25, LR / 3]) and resumed == pytest.approx([LR * 0.125, LR / 4])


def with_a_group_more(kind: str) -> tuple[list[float], str]:
    """Return the rates after a layer is unfrozen with its own rate, and the error of the schedule; empty if none."""
    import windlass

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].requires_grad_(False)
    config = ds_config(Recipe(optimizer_params=(("lr", LR),)), Setting(stage=2))
    more: dict[str, Any] = {}
    if kind == "LambdaLR":
        more = {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)}
    else:
        params = {"warmup_min_lr": 0.0, "warmup_max_lr": LR, "warmup_num_steps": 4, "warmup_type": "linear"}
        config["scheduler"] = {"type": kind, "params": params}
    engine = windlass.initialize(model=model, config=config, **more)[0]
    text = ""
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(True)
            engine.optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.003})
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        try:
            engine.step()
        except windlass.WindlassError as error:
            text = str(error)
    result = engine.get_lr()
    engine.destroy()
    return result, text


def test_schedule_after_adding_a_group() -> None:
    for result, text in run_ranks(with_a_group_more, 2, "WarmupLR"):
        assert result == pytest.approx([LR * 3 / 4, 0.003]) and not text
    for result, text in run_ranks(with_a_group_more, 2, "LambdaLR"):
        assert result[1] == 0.003
        assert (
            "LambdaLR was constructed for 1 optimizer groups, and there are 2" in text and "engine.lr_scheduler" in text
        )
