"""Tests of the accumulation boundary set by the configuration, by `no_sync`, or by the caller."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from tests.dist.equivalence_runs import (
    RankTrace,
    Setting,
    backward_of,
    complaints,
    ds_config,
    expected,
    finished,
    reads_gradients,
    specimen,
    start,
    whole_grads,
)
from tests.dist.harness import run_ranks
from tests.models import Place
from tests.oracle import Recipe
from tests.pairwise import covering_rows, pairwise

ACCUMULATION = 3
RECIPE = Recipe(ranks=2, accumulation=ACCUMULATION, steps=3)


def by_hand(name: str, setting: Setting, way: str) -> RankTrace:
    """Accumulate three micro-batches by manual steps, boundaries or `no_sync`; the configuration has one per step."""
    subject, rank = specimen(name), dist.get_rank()
    config = ds_config(replace(RECIPE, accumulation=1), setting)
    if way == "step":
        config["managed_gradient_accumulation"] = False
    engine = start(subject, config)
    run_backward = backward_of(engine, setting.plain_backward)

    def backward(loss: Any, retain_graph: bool = False) -> None:
        run_backward(loss / ACCUMULATION, retain_graph=retain_graph)

    trace = RankTrace()
    for step in range(RECIPE.steps):
        losses = []
        for micro in range(ACCUMULATION):
            last = micro == ACCUMULATION - 1
            batch = subject.batch(Place(step, micro, rank))
            if way == "step":
                assert not engine.is_gradient_accumulation_boundary()
                losses.append(float(subject.train(engine, batch, backward)))
            elif way == "boundary":
                engine.set_gradient_accumulation_boundary(last)
                assert engine.is_gradient_accumulation_boundary() == last
                losses.append(float(subject.train(engine, batch, backward)))
            elif last:
                losses.append(float(subject.train(engine, batch, backward)))
            else:
                with engine.no_sync():
                    losses.append(float(subject.train(engine, batch, backward)))
        if reads_gradients(RECIPE, step):
            trace.grads[step] = whole_grads(engine.module)
        engine.step()
        trace.losses.append(losses)
        trace.norms.append(float(engine.grad_norm()))
        assert engine.global_steps == step + 1
        if way == "step" and "once" not in subject.traits and name != "two_losses":
            assert engine.global_samples == (step + 1) * ACCUMULATION * engine.train_batch_size()
    return finished(engine, trace)


HANDS = pairwise(
    {
        "name": ["tied", "unused_by_micro", "layer_reuse", "checkpoint_reentrant", "two_losses"],
        "stage": [3, 2, 1, 0],
        "way": ["no_sync", "boundary", "step"],
        "transport": ["gloo", "shm"],
        "plain": [False, True],
    }
)


# `make test` has every model, and every pair of the other values.
QUICK = covering_rows(HANDS, lambda a, b: "name" not in (a, b))


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if quick else pytest.mark.slow) for row, quick in zip(HANDS, QUICK, strict=True)],
    ids=lambda row: "-".join(str(value) for value in row.values()),
)
def test_manual_accumulation(row: dict[str, Any]) -> None:
    setting = Setting(stage=row["stage"], transport=row["transport"], plain_backward=row["plain"])
    actual = run_ranks(by_hand, 2, row["name"], setting, row["way"], transport=row["transport"])
    text = complaints(actual, expected(row["name"], RECIPE), RECIPE)
    assert not text, "\n".join(text)


def counters(stage: int) -> list[tuple[Any, ...]]:
    subject = specimen("mlp")
    engine = start(subject, ds_config(Recipe(ranks=2, accumulation=3), Setting(stage=stage)))
    seen = []
    for micro in range(7):
        boundary = engine.is_gradient_accumulation_boundary()
        subject.train(engine, subject.batch(Place(0, micro, dist.get_rank())), engine.backward)
        engine.step()
        seen.append((boundary, engine.micro_steps, engine.global_steps, engine.was_step_applied()))
    numbers = (
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
        engine.zero_optimization_stage(),
        engine.global_samples,
    )
    engine.destroy()
    return [*seen, numbers]


def test_counters_advance_step_by_step(stage: int) -> None:
    for seen in run_ranks(counters, 2, stage):
        assert [row[0] for row in seen[:7]] == [False, False, True, False, False, True, False]
        assert [row[1] for row in seen[:7]] == [1, 2, 3, 4, 5, 6, 7]
        assert [row[2] for row in seen[:7]] == [0, 0, 1, 1, 1, 2, 2]
        assert [row[3] for row in seen[:7]] == [False, False, True, False, False, True, False]
        assert seen[7] == (18, 3, 3, stage, 36)


def step_inside_no_sync(stage: int) -> str:
    subject = specimen("mlp")
    engine = start(subject, ds_config(Recipe(), Setting(stage=stage)))
    try:
        with engine.no_sync():
            subject.train(engine, subject.batch(Place(0, 0, 0)), engine.backward)
            engine.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.destroy()
    return ""


@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_inside_no_sync_is_refused(stage: int) -> None:
    assert all("no_sync" in text for text in run_ranks(step_inside_no_sync, 2, stage))
