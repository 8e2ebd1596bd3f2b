"""Tests of schedules against independent closed forms, and of the interface that engines and clients use."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.base.errors import ConfigError
from windlass.optim import scheduler_factory

GROUP_LRS = (0.1, 0.02)


def plain_optimizer() -> Any:
    """Return an object with `param_groups`, which is all that schedules need."""
    return SimpleNamespace(param_groups=[{"lr": lr, "betas": (0.9, 0.999), "params": []} for lr in GROUP_LRS])


def lrs(optimizer: Any) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def run(name: str, params: dict[str, Any], steps: int) -> list[list[float]]:
    """Return the learning rates of each of `steps` optimizer steps, the first before any `scheduler.step()`."""
    optimizer = plain_optimizer()
    schedule = scheduler_factory.build_scheduler(name, params, optimizer)
    used = [lrs(optimizer)]
    for _ in range(steps - 1):
        schedule.step()
        used.append(lrs(optimizer))
    return used


def line(x: float, points: list[tuple[float, float]]) -> float:
    """Interpolate linearly through `points`, constant outside."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


@pytest.mark.parametrize("staircase", [False, True])
def test_lr_range_test(staircase: bool) -> None:
    params = {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 0.5,
              "lr_range_test_staircase": staircase}  # fmt: skip
    for used_at, rates in enumerate(run("LRRangeTest", params, 13)):
        intervals = used_at // 4 if staircase else used_at / 4
        assert rates == pytest.approx([0.01 + 0.005 * intervals] * 2)


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("maximum", [0.05, [0.05, 0.2], None])
def test_warmup(kind: str, maximum: Any) -> None:
    steps, least = 7, 0.001
    params: dict[str, Any] = {"warmup_min_lr": least, "warmup_num_steps": steps, "warmup_type": kind}
    if maximum is not None:
        params["warmup_max_lr"] = maximum
    tops = maximum if isinstance(maximum, list) else [maximum] * 2 if maximum else list(GROUP_LRS)
    for used_at, rates in enumerate(run("WarmupLR", params, 15)):
        iteration = max(0, used_at - 1)  # the first two steps both use the minimum
        part = min(1.0, math.log(iteration + 1, steps) if kind == "log" else iteration / steps)
        assert rates == pytest.approx([least + (top - least) * part for top in tops])


def test_warmup_decay_is_a_triangle() -> None:
    params = {"total_num_steps": 20, "warmup_min_lr": 0.0, "warmup_max_lr": 1.0, "warmup_num_steps": 5,
              "warmup_type": "linear"}  # fmt: skip
    for used_at, rates in enumerate(run("WarmupDecayLR", params, 25)):
        assert rates == pytest.approx([line(used_at - 1, [(0, 0), (5, 1), (20, 0)])] * 2)


def test_warmup_cosine_multiplies_the_optimizers_own_rates() -> None:
    warm, total, low, end = 4, 16, 0.25, 0.1
    params = {"total_num_steps": total, "warmup_min_ratio": low, "warmup_num_steps": warm, "cos_min_ratio": end,
              "warmup_type": "linear"}  # fmt: skip
    for used_at, rates in enumerate(run("WarmupCosineLR", params, 24)):
        iteration = max(0, used_at - 1)
        angle = math.pi * min(1.0, (iteration + 1 - warm) / (total - warm))
        ratio = low + (1 - low) * iteration / warm if iteration < warm else end + (1 - end) * math.cos(angle / 2) ** 2
        assert rates == pytest.approx([lr * ratio for lr in GROUP_LRS])


def test_one_cycle_is_a_triangle_then_a_hyperbola_and_the_momentum_mirrors_it() -> None:
    optimizer = plain_optimizer()
    schedule = scheduler_factory.OneCycle(
        optimizer, 0.1, [1.0, 2.0], decay_lr_rate=0.5, cycle_first_step_size=4, cycle_second_step_size=6,
        decay_step_size=3, cycle_min_mom=0.7, cycle_max_mom=0.95, decay_mom_rate=0.01,
    )  # fmt: skip
    assert lrs(optimizer) == [0.1, 0.1]
    assert [group["betas"] for group in optimizer.param_groups] == [(0.7, 0.99)] * 2
    for iteration in range(25):
        schedule.step()
        if iteration < 10:
            height = line(iteration + 1, [(0, 0), (4, 1), (10, 0)])
            rates, momentum = [0.1 + 0.9 * height, 0.1 + 1.9 * height], 0.95 - 0.25 * height
        else:
            n = (iteration - 9) / 3
            rates, momentum = [0.1 / (1 + 0.5 * n)] * 2, 0.95 * (1 + 0.01 * n)
        assert lrs(optimizer) == pytest.approx(rates)
        assert all(group["betas"] == pytest.approx((momentum, 0.99)) for group in optimizer.param_groups)


def test_one_cycle_stairs() -> None:
    optimizer = plain_optimizer()
    params = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 6, "cycle_second_step_size": 4,
              "cycle_first_stair_count": 3, "cycle_second_stair_count": 2}  # fmt: skip
    schedule = scheduler_factory.build_scheduler("OneCycle", params, optimizer)
    results = [lrs(optimizer)[0]]
    for _ in range(10):
        schedule.step()
        results.append(lrs(optimizer)[0])
    third = 1 / 3
    assert results == pytest.approx([0, 0, third, third, 2 * third, 2 * third, 1, 0.5, 0.5, 0, 0])


def test_one_cycle_leaves_an_optimizer_without_betas_its_momentum() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    schedule = scheduler_factory.OneCycle(optimizer, 0.1, 1.0)
    schedule.step()
    assert schedule.get_mom() is None
    assert optimizer.param_groups[0]["momentum"] == 0.9


EXAMPLES: dict[str, dict[str, Any]] = {
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 3, "decay_step_size": 2,
                 "decay_lr_rate": 0.1, "decay_mom_rate": 0.001},
    "WarmupLR": {"warmup_num_steps": 5},
    "WarmupDecayLR": {"warmup_num_steps": 5, "total_num_steps": 12},
    "WarmupCosineLR": {"warmup_num_steps": 5, "total_num_steps": 12},
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
@given(before=st.integers(0, 14), after=st.integers(0, 8))
@settings(max_examples=10, deadline=None)
def test_resuming_changes_nothing(name: str, before: int, after: int) -> None:
    straight, loaded = plain_optimizer(), plain_optimizer()
    first = scheduler_factory.build_scheduler(name, EXAMPLES[name], straight)
    for _ in range(before):
        first.step()
    second = scheduler_factory.build_scheduler(name, EXAMPLES[name], loaded)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(after):
        assert lrs(loaded) == lrs(straight)
        first.step()
        second.step()
    assert lrs(loaded) == lrs(straight)
    assert loaded.param_groups[0]["betas"] == straight.param_groups[0]["betas"]
    if before + after:
        assert second.get_last_lr() == lrs(straight) == first.get_last_lr() == first.get_lr()


@pytest.mark.parametrize("name", EXAMPLES)
def test_last_lr_before_a_step_is_the_initial_one(name: str) -> None:
    """Before any step, `get_last_lr` returns the starting rate.

    In DeepSpeed OneCycle raises an assertion instead, which clients handle.
    """
    optimizer = plain_optimizer()
    schedule = scheduler_factory.build_scheduler(name, EXAMPLES[name], optimizer)
    for _ in range(2):
        if name == "OneCycle":
            with pytest.raises(AssertionError, match="need to call step"):
                schedule.get_last_lr()
        else:
            assert schedule.get_last_lr() == lrs(optimizer)
        schedule.load_state_dict(schedule.state_dict())


def test_one_cycle_sets_the_initial_momentum() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9}
    schedule = scheduler_factory.build_scheduler("OneCycle", {**params, "cycle_first_step_size": 5}, optimizer)
    assert schedule.get_mom() == [(0.9, 0.99)] and optimizer.param_groups[0]["betas"] == (0.8, 0.99)


@pytest.mark.parametrize("name", EXAMPLES)
def test_step_accepts_an_iteration(name: str) -> None:
    one_by_one, at_once = plain_optimizer(), plain_optimizer()
    slow, fast = (
        scheduler_factory.build_scheduler(name, EXAMPLES[name], optimizer) for optimizer in (one_by_one, at_once)
    )
    for _ in range(8):
        slow.step()
    fast.step(7)
    assert lrs(at_once) == lrs(one_by_one)
    assert fast.state_dict() == slow.state_dict() == {"last_batch_iteration": 7}


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupCosineLR"])
def test_constructor_with_last_iteration_restores_initial_rates(name: str) -> None:
    optimizer = plain_optimizer()
    schedule = scheduler_factory.build_scheduler(name, EXAMPLES[name], optimizer)
    for _ in range(4):
        schedule.step()
    for group in optimizer.param_groups:
        group["lr"] = 7.0
    again = scheduler_factory.build_scheduler(name, {**EXAMPLES[name], "last_batch_iteration": 3}, optimizer)
    assert lrs(optimizer) == [7.0, 7.0]
    schedule.step()
    expected = lrs(optimizer)
    again.step()
    assert lrs(optimizer) == expected


def test_new_schedule_starts_from_the_current_rates() -> None:
    optimizer = plain_optimizer()
    for scale in (1.0, 10.0):
        for group, lr in zip(optimizer.param_groups, GROUP_LRS, strict=True):
            group["lr"] = scale * lr
        scheduler_factory.build_scheduler("WarmupLR", {"warmup_num_steps": 2}, optimizer).step(5)
        assert lrs(optimizer) == pytest.approx([scale * lr for lr in GROUP_LRS])


def test_a_rate_held_in_a_tensor_is_written_in_place() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=rate)
    scheduler_factory.build_scheduler("WarmupLR", {"warmup_num_steps": 2, "warmup_type": "linear"}, optimizer).step(1)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.25)


def test_one_warmup_step_counts_as_two() -> None:
    assert run("WarmupLR", {"warmup_num_steps": 1}, 5) == run("WarmupLR", {"warmup_num_steps": 2}, 5)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
@pytest.mark.parametrize(
    "cls", [scheduler_factory.WarmupLR, scheduler_factory.WarmupDecayLR, scheduler_factory.WarmupCosineLR]
)
def test_a_warmup_of_no_steps_is_a_value_error(cls: Any, steps: Any) -> None:
    total = {} if cls is scheduler_factory.WarmupLR else {"total_num_steps": 9}
    with pytest.raises(ValueError, match="warmup_num_steps must be a positive integer"):
        cls(plain_optimizer(), warmup_num_steps=steps, **total)


@pytest.mark.parametrize(
    ("type", "params", "words"),
    [
        (
            "WarmupDecayLr",
            {"warmup_nun_steps": 1},
            ["total_num_steps: WarmupDecayLR needs", "nearest is warmup_num"],
        ),
        ("WarmupLR", {"warmup_num_steps": "auto"}, ['= "auto"']),
        ("WarmupLR", {"warmup_num_steps": 0}, ["warmup_num_steps: 0 does not fit", ">= 1"]),
        ("WarmupLR", {"warmup_max_lr": [0.1]}, ["expected 2 values for warmup_max_lr"]),
        ("WarmupLR", {"warmup_type": "cubic"}, ["cubic", '"log" or "linear"']),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, ["cycle_first_step_size"]),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, ["lr_range_test_step_size"]),
        ("WarmupCosine", {}, ["nearest is WarmupCosineLR"]),
        ("CosineAnnealingLR", {"T_max": 0}, ["refused by CosineAnnealingLR"]),
        ("LambdaLR", {}, ["Python objects"]),
        ("ReduceLROnPlateau", {}, ["metric"]),
        ("LRScheduler", {}, ["base class"]),
    ],
)
def test_wrong_sections_are_refused(type: str, params: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        scheduler_factory.build_scheduler(type, params, plain_optimizer())
    assert all(word in str(caught.value) for word in words), str(caught.value)


TORCH_EXAMPLES: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 4]},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 5},
    "OneCycleLR": {"max_lr": 0.5, "total_steps": 10},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0, "cycle_momentum": False},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
}


@pytest.mark.parametrize(
    "name", [n for n in scheduler_factory.list_scheduler_names() if n not in scheduler_factory.OWN_SCHEDULES]
)
@pytest.mark.parametrize("spell", [str, str.lower])
def test_torch_schedulers_by_name(name: str, spell: Any) -> None:
    ours, theirs = (torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9) for _ in range(2))
    params = TORCH_EXAMPLES.get(name, {})
    built = scheduler_factory.build_scheduler(spell(name), params, ours)
    reference = getattr(torch.optim.lr_scheduler, name)(theirs, **params)
    assert type(built) is type(reference)
    for _ in range(5):
        for optimizer, schedule in ((ours, built), (theirs, reference)):
            optimizer.step()
            schedule.step()
        assert lrs(ours) == lrs(theirs)


@pytest.mark.parametrize("name", ["WarmupLR", "OneCycle"])
def test_added_group_keeps_its_rate(name: str) -> None:
    optimizer = plain_optimizer()
    groups = len(optimizer.param_groups)
    params = {"WarmupLR": {}, "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}[name]
    schedule = scheduler_factory.build_scheduler(name, params, optimizer)
    before = lrs(optimizer)
    optimizer.param_groups.append({"lr": 3e-3, "betas": (0.9, 0.999), "params": []})
    for _ in range(3):
        schedule.step()
    assert lrs(optimizer)[groups:] == [3e-3]
    assert all(now > then for now, then in zip(lrs(optimizer), before, strict=False))
    assert len(schedule.get_last_lr()) == groups
