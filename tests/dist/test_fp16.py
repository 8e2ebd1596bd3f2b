"""Tests of fp16: the loss scale, its options, steps skipped after an overflow, and log messages."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.equivalence_runs import Setting, ds_config, hold_all, specimen, start, whole_params
from tests.dist.harness import run_ranks
from tests.models import Place, cast
from tests.oracle import Recipe, relative_error

RECIPE = Recipe(ranks=2, precision="fp16", optimizer_params=(("lr", 0.05), ("momentum", 0.9)))


@pytest.mark.parametrize("scaling", [{"loss_scale": 1.0}, {"loss_scale": 256.0}, {"initial_scale_power": 8}], ids=str)
def test_loss_scale_does_not_affect_results(scaling: dict[str, Any], transport: str) -> None:
    recipe = Recipe(ranks=2, accumulation=2, steps=3, precision="fp16")
    config = (("fp16", {"enabled": True, **scaling}),)
    hold_all("tied", recipe, [Setting(stage=s, transport=transport, config=config) for s in range(4)])


def scales(fp16: dict[str, Any], overflows: list[bool], setting: Setting) -> list[dict[str, Any]]:
    """Train with overflows on rank 1 at the given steps. Return scale, flags and counters of each step."""
    subject, rank = specimen("mlp"), dist.get_rank()
    engine = start(subject, {**ds_config(RECIPE, setting), "fp16": {"enabled": True, **fp16}})
    seen, before = [], whole_params(engine.module)
    for step, overflow in enumerate(overflows):
        loss = engine(**cast(subject.batch(Place(step, 0, rank)), RECIPE.dtype))
        engine.backward(loss * 1e9 if overflow and rank == 1 else loss)
        engine.step()
        after = whole_params(engine.module)
        seen.append(
            {
                "scale": float(engine.optimizer.loss_scale),
                "overflow": bool(engine.optimizer.overflow),
                "applied": engine.was_step_applied(),
                "moved": relative_error(after, before)[0] > 0,
                "skipped": engine.skipped_steps,
                "steps": engine.global_steps,
            }
        )
        before = after
    engine.destroy()
    return seen


YES, NO = True, False
KNOBS: dict[str, tuple[dict[str, Any], list[bool], list[float]]] = {
    "halves": ({"initial_scale_power": 8, "hysteresis": 1}, [NO, YES, NO, YES], [256, 128, 128, 64]),
    "hysteresis": ({"initial_scale_power": 8, "hysteresis": 2}, [YES, YES, YES], [256, 128, 64]),
    "window": ({"initial_scale_power": 4, "loss_scale_window": 2}, [NO, NO, NO, NO], [16, 32, 32, 64]),
    "minimum": (
        {"initial_scale_power": 3, "hysteresis": 1, "min_loss_scale": 4.0},
        [YES, NO, YES],
        [4, 4, 4],
    ),
    "static": ({"loss_scale": 64.0}, [NO, YES, NO], [64, 64, 64]),
}


@pytest.mark.parametrize("name", [k for k in KNOBS if k != "minimum"])
def test_loss_scale_follows_its_options_and_an_overflow_changes_nothing(name: str, stage: int) -> None:
    fp16, overflows, expected = KNOBS[name]
    for seen in run_ranks(scales, 2, fp16, overflows, Setting(stage=stage)):
        assert [row["scale"] for row in seen] == expected
        assert [row["overflow"] for row in seen] == overflows
        assert [row["applied"] for row in seen] == [not overflow for overflow in overflows]
        assert [row["moved"] for row in seen] == [not overflow for overflow in overflows]
        assert seen[-1]["skipped"] == sum(overflows)
        assert seen[-1]["steps"] == len(overflows)


class Collector(logging.Handler):
    """Handler that collects log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def message_of_an_overflow(setting: Setting) -> list[str]:
    collector = Collector()
    logging.getLogger("windlass").addHandler(collector)
    try:
        scales({"initial_scale_power": 8}, [NO, YES], setting)
    finally:
        logging.getLogger("windlass").removeHandler(collector)
    return collector.lines


def test_overflow_message_names_parameter_rank_micro_batch_and_step(stage: int) -> None:
    first = run_ranks(message_of_an_overflow, 2, Setting(stage=stage))[0]
    text = [line for line in first if "overflow" in line.lower()]
    names = [name for name, _ in specimen("mlp").build().named_parameters()]
    assert text, first
    assert any(name in text[0] for name in names), text[0]
    assert "rank 1" in text[0] and "step" in text[0] and "micro" in text[0], text[0]


def plain_backward(scale: bool, setting: Setting) -> tuple[str, dict[str, Any] | None]:
    subject, rank = specimen("loss_outside"), dist.get_rank()
    config = {**ds_config(RECIPE, setting), "fp16": {"enabled": True, "initial_scale_power": 8}}
    engine = start(subject, config)
    params = None
    text = ""
    try:
        for step in range(2):
            batch = cast(subject.batch(Place(step, 0, rank)), RECIPE.dtype)

            def backward(loss: Any) -> None:
                (engine.scale(loss) if scale else loss).backward()

            subject.train(engine, batch, backward)
            engine.step()
        params = whole_params(engine.module)
    except Exception as error:
        text = str(error)
    finally:
        engine.destroy()
    return text, params


def through_engine(setting: Setting) -> dict[str, Any]:
    subject, rank = specimen("loss_outside"), dist.get_rank()
    engine = start(subject, {**ds_config(RECIPE, setting), "fp16": {"enabled": True, "initial_scale_power": 8}})
    for step in range(2):
        subject.train(engine, cast(subject.batch(Place(step, 0, rank)), RECIPE.dtype), engine.backward)
        engine.step()
    params = whole_params(engine.module)
    engine.destroy()
    return params


@pytest.mark.parametrize("scale", [True, False], ids=["engine.scale", "bare"])
def test_plain_backward_is_scaled_or_refused_by_name(scale: bool, stage: int) -> None:
    expected = run_ranks(through_engine, 2, Setting(stage=stage))
    for rank, (text, params) in enumerate(run_ranks(plain_backward, 2, scale, Setting(stage=stage))):
        assert (params is None) == (not scale), text
        if params is None:
            assert "engine.scale" in text
        else:
            assert relative_error(params, expected[rank])[0] < 1e-3


def too_small(setting: Setting) -> str:
    fp16, overflows, _ = KNOBS["minimum"]
    try:
        scales(fp16, overflows, setting)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_overflow_at_the_minimum_scale_raises_on_every_rank() -> None:
    for text in run_ranks(too_small, 2, Setting(stage=2)):
        assert text.startswith("LossError") and "min_loss_scale" in text


def cast_by_engine(setting: Setting) -> list[list[float]]:
    """Return the losses of two forwards on fp32 inputs with auto_cast, and of two on fp16 inputs."""
    subject, rank = specimen("mlp"), dist.get_rank()
    config = {**ds_config(RECIPE, setting), "fp16": {"enabled": True, "auto_cast": True}}
    engine = start(subject, config)
    batches = [subject.batch(Place(step, 0, rank)) for step in range(2)]
    losses = [[float(engine(**inputs).detach()) for inputs in (batch, cast(batch, torch.float16))] for batch in batches]
    engine.destroy()
    return losses


def test_fp16_auto_cast_casts_the_inputs(stage: int) -> None:
    for losses in run_ranks(cast_by_engine, 2, Setting(stage=stage)):
        assert all(loss == expected for loss, expected in losses)


def ends_of_backward(stage: int, plain: bool, precision: str) -> list[int]:
    """Return the number of calls of the reducer's `end_backward` in each step, under reentrant checkpointing."""
    subject = specimen("checkpoint_reentrant")
    more = (("fp16", {"enabled": True, "loss_scale": 64}),) if precision == "fp16" else ()
    recipe = Recipe(precision="fp32")
    engine = start(subject, {**ds_config(recipe, Setting(stage=stage)), **dict(more)})
    dtype = torch.float16 if precision == "fp16" else torch.float32
    counts = []
    ended = engine._sharded.reducer.end_backward

    def counted(reduce_remaining: Any) -> None:
        counts[-1] += 1
        ended(reduce_remaining)

    engine._sharded.reducer.end_backward = counted
    for step in range(2):
        counts.append(0)
        batch = cast(subject.batch(Place(step, 0, dist.get_rank())), dtype)
        loss = engine(**batch)
        if plain:
            engine.scale(loss).backward()
        else:
            engine.backward(loss)
        engine.step()
    engine.destroy()
    return counts


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("plain", [False, True])
def test_nested_backwards_do_not_end_the_outer_backward(stage: int, plain: bool, precision: str) -> None:
    for counts in run_ranks(ends_of_backward, 2, stage, plain, precision):
        assert counts == [1, 1]
