"""Tests of delayed updates: parameters follow the recurrence of a one-step delay at any stage, tier and transport.

Reads, checkpoints, overflows and failures during an update are tested too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist.equivalence_runs import (
    ADAMW,
    FP32_BOUND,
    Setting,
    bitwise_difference,
    ds_config,
    expected,
    specimen,
    start,
    whole_params,
)
from tests.dist.harness import run_ranks
from tests.dist.quick_rows import in_shares, share
from tests.dist.test_disk_failure import Breaker, attempt
from tests.dist.test_disk_failure import step as whole_step
from tests.dist.test_offload import EMULATED, LATE, hold, offload_to, train_all
from tests.models import Place, cast
from tests.oracle import Recipe, relative_error
from windlass.base.errors import StorageError

CASES = [
    (1, "cpu", "none"),
    (2, "cpu", "none"),
    (3, "cpu", "none"),
    (3, "cpu", "cpu"),
    (1, "nvme", "none"),
    (2, "nvme", "none"),
    (3, "nvme", "cpu"),
    (3, "cpu", "nvme"),
]
HOST = [case for case in CASES if case[1:] in (("cpu", "none"), ("cpu", "cpu"))]
DELAYED = Recipe(ranks=2, steps=4, optimizer="AdamW", optimizer_params=ADAMW, delayed_from=0)


def late(case: tuple[int, str, str], folder: Any, transport: str = "gloo", **more: Any) -> Setting:
    """Return the setting of a case with delayed updates."""
    stage, state, param = case
    return Setting(stage=stage, transport=transport, zero=offload_to(state, param, folder, delayed_update=True, **more))


# ---------------------------------------------------------------------------------------------------- the recurrence


@in_shares
def test_parameters_follow_the_recurrence(transport: str, every: bool, tmp_path: Any) -> None:
    recipe = replace(DELAYED, accumulation=2)
    cases = share(CASES, transport == "shm", 2, every)
    hold("tied", recipe, [late(case, tmp_path, transport) for case in cases], LATE)


def test_one_rank_follows_the_recurrence(tmp_path: Any) -> None:
    hold("tied", replace(DELAYED, ranks=1), [late(case, tmp_path) for case in CASES], LATE)


@in_shares
def test_recurrence_holds_if_host_memory_is_device_memory(transport: str, every: bool, tmp_path: Any) -> None:
    cases = share([case for case in CASES if case != (3, "cpu", "nvme")], transport == "gloo", 2, every)
    hold("tied", DELAYED, [late(case, tmp_path, transport) for case in cases], {})


def test_oracle_detects_a_delay() -> None:
    """The bounds distinguish a delay of one step from an immediate update."""
    at_once = expected("tied", replace(DELAYED, delayed_from=None, accumulation=2))
    one_late = expected("tied", replace(DELAYED, accumulation=2))
    assert relative_error(at_once.params, one_late.params)[0] > 100 * FP32_BOUND


UNUSUAL = ["frozen", "unused_by_step", "lora", "odd_shapes", "checkpoint_reentrant"]


@pytest.mark.parametrize("name", UNUSUAL)
@in_shares
def test_unusual_models_follow_the_recurrence(name: str, transport: str, every: bool, tmp_path: Any) -> None:
    cases = share([(1, "cpu", "none"), (3, "cpu", "cpu"), (3, "nvme", "none")], UNUSUAL.index(name), 3, every)
    recipe = replace(DELAYED, optimizer="SGD", optimizer_params=(("lr", 0.05), ("momentum", 0.9)))
    hold(name, recipe, [late(case, tmp_path, transport) for case in cases], LATE)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@in_shares
def test_16_bit_models_follow_the_recurrence(precision: str, transport: str, every: bool, tmp_path: Any) -> None:
    recipe = Recipe(ranks=2, accumulation=2, steps=3, precision=precision, delayed_from=0)
    cases = share([case for case in CASES if case[0] != 2], precision == "fp16", 2, every)
    hold("mlp", recipe, [late(case, tmp_path, transport) for case in cases], LATE)


def test_tiers_of_delayed_updates_agree_bitwise(transport: str, tmp_path: Any) -> None:
    cases = [*((3, a, b) for a, b in [("cpu", "none"), ("cpu", "cpu"), ("nvme", "nvme")])]
    settings = [late(case, tmp_path, transport) for case in cases]
    settings.append(late((3, "nvme", "none"), tmp_path, transport, gradient_device="nvme"))
    settings.append(replace(settings[1], zero=(*settings[1].zero, ("sub_group_size", 100))))
    first, *others = train_all("mlp", DELAYED, settings, 2, LATE)
    for setting, result in zip(settings[1:], others, strict=True):
        assert not bitwise_difference(first, result), setting


def test_first_steps_can_be_undelayed(transport: str, tmp_path: Any) -> None:
    recipe = replace(DELAYED, delayed_from=2)
    hold("mlp", recipe, [late(case, tmp_path, transport, delayed_update_start=2) for case in HOST], LATE)


def test_disabled_delay_updates_immediately(tmp_path: Any) -> None:
    text, silent = (
        Setting(stage=3, zero=offload_to("cpu", "cpu", tmp_path, **more)) for more in ({"delayed_update": False}, {})
    )
    first, other = train_all("mlp", replace(DELAYED, delayed_from=None), [text, silent], 2, LATE)
    assert not bitwise_difference(first, other)


# ------------------------------------------------------------------------------------------------- overlap


def train(engine: Any, step: int, recipe: Recipe = DELAYED, factor: float = 1.0) -> None:
    """Run forward and backward of one step of the mlp."""
    subject = specimen("mlp")
    batch = cast(subject.batch(Place(step, 0, dist.get_rank())), recipe.dtype)
    subject.train(engine, batch, lambda loss: engine.backward(loss * factor))


def engine_of(setting: Setting, recipe: Recipe = DELAYED, **more: Any) -> Any:
    return start(specimen("mlp"), {**ds_config(recipe, setting), **more})


def hold_up(engine: Any) -> threading.Event:
    """Block updates until the returned event is set."""
    may, inner = threading.Event(), engine._sharded.update._inner
    full = inner.step

    def step() -> Any:
        assert may.wait(60), "the update was never let go"
        return full()

    inner.step = step
    return may


def overlapped(setting: Setting) -> dict[str, Tensor]:
    """Train with each update blocked during the next forward and backward, while another learning rate is set."""
    engine = engine_of(setting)
    may = hold_up(engine)
    rate = dict(DELAYED.optimizer_params)["lr"]
    for step in range(DELAYED.steps):
        train(engine, step)
        may.set()
        engine._sharded.wait_for_update()
        may.clear()
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        engine.step()
        for group in engine.optimizer.param_groups:
            group["lr"] = 100.0
    may.set()
    result = whole_params(engine.module)
    engine.destroy()
    return result


@pytest.mark.parametrize("case", HOST, ids=str)
def test_a_step_returns_before_its_update_begins(case: tuple[int, str, str], transport: str, tmp_path: Any) -> None:
    for actual in run_ranks(overlapped, 2, late(case, tmp_path), env=LATE, transport=transport):
        assert relative_error(actual, expected("mlp", DELAYED).params)[0] <= FP32_BOUND


def kept(setting: Setting, recipe: Recipe) -> dict[str, Any]:
    """Return peak and final bytes on the device, bytes by slot and tier, and the report on delayed updates."""
    from windlass.base import device_memory

    engine = engine_of(setting, recipe)
    place = device_memory.emulated_device_memory()
    assert place is not None
    place.peak = place.used
    for step in range(3):
        train(engine, step, recipe)
        engine.step()
    results = {"slots": engine.report()["slots"], "delayed": engine.report()["delayed_update"]}
    engine.destroy()
    return {**results, "peak": place.peak, "after": place.used}


@pytest.mark.parametrize("case", HOST, ids=str)
def test_device_memory_is_unchanged_and_the_report_counts_host_memory(
    case: tuple[int, str, str], tmp_path: Any
) -> None:
    recipe = replace(DELAYED, precision="bf16")
    delayed = late(case, tmp_path)
    at_once = replace(delayed, zero=offload_to(*case[1:], tmp_path))
    first, other = (run_ranks(kept, 2, s, recipe, env=EMULATED, transport="gloo")[0] for s in (at_once, delayed))
    assert other["peak"] == first["peak"] and other["after"] == 0
    assert first["delayed"] is None and other["delayed"]["seconds"] > 0
    master = other["slots"]["master", "host"]
    more = {what: size for what, size in other["slots"].items() if what not in first["slots"]}
    assert more == {("grad in update", "host"): master, ("next param", "host"): master // 2}


# --------------------------------------------------------------------------------------- reads during an update


def seen(setting: Setting, way: str, folder: str) -> dict[str, Any]:
    """Return parameters read in one way after two steps (three for `set`), and whether an update was in flight."""
    import windlass

    engine = engine_of(setting)
    for step in range(2):
        train(engine, step)
        engine.step()
    under_way = engine._sharded.delayed_update.in_progress
    named = dict(engine.module.named_parameters())
    if way == "full_param":
        results = whole_params(engine.module)
    elif way == "full_state_dict":
        results = engine.full_state_dict()
    elif way == "gathered":
        with windlass.zero.GatheredParameters(list(named.values())):
            results = {name: p.detach().clone() for name, p in named.items()}
    elif way == "finish_update":
        engine.finish_update()
        assert not engine._sharded.delayed_update.in_progress
        results = engine.full_state_dict()
    elif way == "save":
        engine.save_checkpoint(folder)
        assert not engine._sharded.delayed_update.in_progress
        results = whole_params(engine.module)
    elif way == "set":
        first = next(iter(named))
        before = windlass.zero.full_param(named[first]).detach()
        train(engine, 2)
        engine.step()
        windlass.zero.set_full_param(named[first], before)
        assert not engine._sharded.delayed_update.in_progress
        results = {**whole_params(engine.module), first: before}
        assert torch.equal(windlass.zero.full_param(named[first]), before)
    elif way == "offload_states":
        engine.offload_states()
        engine.reload_states()
        results = whole_params(engine.module)
    else:
        assert way == "destroy"
        engine.destroy()
        results = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return {"under_way": under_way, "found": results}


WAYS = ["full_param", "full_state_dict", "gathered", "finish_update", "save", "set", "offload_states", "destroy"]


@pytest.mark.parametrize("way", WAYS)
@in_shares
def test_reads_return_values_of_the_last_step(way: str, transport: str, every: bool, tmp_path: Any) -> None:
    for number, case in enumerate(share((HOST[0], HOST[-1]), list(WAYS).index(way), 2, every)):
        text = run_ranks(seen, 2, late(case, tmp_path), way, str(tmp_path / str(number)), env=LATE, transport=transport)
        two = expected("mlp", replace(DELAYED, steps=2))
        three = expected("mlp", replace(DELAYED, steps=3, finished_after=(1,)))
        for rank, item in enumerate(text):
            assert item["under_way"]
            if way in ("full_state_dict", "finish_update") and rank:
                continue  # only rank 0 has the result
            requested = {**three.params, "first": None} if way == "set" else two.params
            requested = {name: value for name, value in requested.items() if name in item["found"]}
            if way == "set":
                first = next(iter(requested))
                requested[first] = two.params[first]
            assert relative_error(item["found"], requested)[0] <= FP32_BOUND, (way, case)


def local_pieces(setting: Setting) -> bool:
    """Return True if masters and states that rank 1 reads alone equal those after all ranks finished the update."""
    import windlass

    def look() -> list[Tensor]:
        results = []
        for parameter in engine.module.parameters():
            state = windlass.zero.local_state(parameter, "exp_avg")
            results += [
                windlass.zero.local_param(parameter).clone(),
                torch.empty(0) if state is None else state.clone(),
            ]
        return results

    engine = engine_of(setting)
    for step in range(2):
        train(engine, step)
        engine.step()
    seen = look() if dist.get_rank() == 1 else None
    engine.finish_update()
    same = seen is None or all(torch.equal(a, b) for a, b in zip(seen, look(), strict=True))
    engine.destroy()
    return same


@pytest.mark.parametrize("case", [(1, "cpu", "none"), (3, "nvme", "none")], ids=str)
def test_local_reads_need_no_other_rank(case: tuple[int, str, str], tmp_path: Any) -> None:
    assert all(run_ranks(local_pieces, 2, late(case, tmp_path), env=LATE))


def changed_in_place(setting: Setting, finishes: bool) -> tuple[str, dict[str, Tensor]]:
    """Change a parameter in place between two steps."""
    engine = engine_of(setting)
    text = ""
    for step in range(2):
        train(engine, step)
        try:
            engine.step()
        except ValueError as error:
            text = f"{type(error).__name__}: {error}"
            break
        if step == 0:
            if finishes:
                engine.finish_update()
            with torch.no_grad():
                engine.module.head.bias.fill_(0.5)
    result = whole_params(engine.module)
    engine.destroy()
    return text, result


def test_in_place_change_raises_before_finish_update_and_counts_after(tmp_path: Any) -> None:
    setting = late((2, "cpu", "none"), tmp_path)
    for text, _ in run_ranks(changed_in_place, 2, setting, False, env=LATE):
        assert text.startswith("ModelError: 'head.bias' was changed in place") and "finish_update" in text
    # both gradients are of the newest parameters, as with immediate updates
    at_once = Setting(stage=2, zero=offload_to("cpu", "none", tmp_path))
    expected = run_ranks(changed_in_place, 2, at_once, False, env=LATE)[0][1]
    for text, actual in run_ranks(changed_in_place, 2, setting, True, env=LATE):
        assert not text and all(torch.equal(actual[name], value) for name, value in expected.items())


# ---------------------------------------------------------------------------------------------------- files


def interrupted(setting: Setting, recipe: Recipe, folder: str) -> dict[str, Any]:
    """Train 2 + 2 steps with a save in between, then load into another engine and repeat the last 2."""

    def continue_training(engine: Any) -> dict[str, Tensor]:
        for step in range(2, recipe.steps):
            train(engine, step, recipe)
            engine.step()
        result = whole_params(engine.module)
        engine.destroy()
        return result

    engine = engine_of(setting, recipe)
    for step in range(2):
        train(engine, step, recipe)
        engine.step()
    engine.save_checkpoint(folder)
    expected = continue_training(engine)
    torch.manual_seed(dist.get_rank() + 99)
    other = engine_of(setting, recipe)
    train(other, 7, recipe)
    other.step()
    assert other._sharded.delayed_update.in_progress
    other.load_checkpoint(folder)
    return {"wanted": expected, "found": continue_training(other)}


@pytest.mark.parametrize("case", [(1, "cpu", "none"), (3, "cpu", "cpu"), (3, "nvme", "none")], ids=str)
def test_resumed_run_equals_a_run_with_finish_update(case: tuple[int, str, str], transport: str, tmp_path: Any) -> None:
    recipe = replace(DELAYED, finished_after=(1,))
    requested = expected("mlp", recipe).params
    assert relative_error(expected("mlp", DELAYED).params, requested)[0] > 10 * FP32_BOUND
    for item in run_ranks(interrupted, 2, late(case, tmp_path), recipe, str(tmp_path), env=LATE, transport=transport):
        assert relative_error(item["wanted"], requested)[0] <= FP32_BOUND
        assert all(torch.equal(item["found"][name], value) for name, value in item["wanted"].items())


# ------------------------------------------------------------------------------------------------- failures


def overflowing(setting: Setting, overflows: bool) -> tuple[dict[str, Tensor], int]:
    """Train. After the second step, run a step that overflows, or finish the update explicitly."""
    recipe = replace(DELAYED, precision="fp16", optimizer="SGD", optimizer_params=(("lr", 0.05), ("momentum", 0.9)))
    engine = engine_of(setting, recipe, fp16={"enabled": True, "loss_scale": 64.0})
    for step in range(recipe.steps):
        train(engine, step, recipe)
        engine.step()
        if step == 1 and overflows:
            train(engine, 9, recipe, 1e9 if dist.get_rank() == 1 else 1.0)
            engine.step()
            assert not engine.was_step_applied() and not engine._sharded.delayed_update.in_progress
        elif step == 1:
            engine.finish_update()
    skipped = engine.skipped_steps
    result = whole_params(engine.module)
    engine.destroy()
    return result, skipped


@pytest.mark.parametrize("case", HOST, ids=str)
def test_overflowing_step_publishes_only_the_previous_update(
    case: tuple[int, str, str], transport: str, tmp_path: Any
) -> None:
    setting = late(case, tmp_path)
    first, other = (run_ranks(overflowing, 2, setting, o, env=LATE, transport=transport) for o in (False, True))
    for (plain, none), (result, skipped) in zip(first, other, strict=True):
        assert (none, skipped) == (0, 1)
        assert all(torch.equal(result[name], value) for name, value in plain.items())


WAYS_TO_NOTICE: dict[str, Callable[[Any, str], Any]] = {
    "step": lambda engine, folder: (train(engine, 2), engine.step()),
    "finish_update": lambda engine, folder: engine.finish_update(),
    "save": lambda engine, folder: engine.save_checkpoint(folder),
    "full_param": lambda engine, folder: whole_params(engine.module),
    "destroy": lambda engine, folder: engine.destroy(),
}


def failing(setting: Setting, way: str, folder: str) -> dict[str, Any]:
    """Fail on rank 1 in the update of the second step, then continue from the checkpoint of the first step."""
    engine = engine_of(setting)
    train(engine, 0)
    engine.step()
    engine.save_checkpoint(folder, tag="good")
    train(engine, 1)
    inner = engine._sharded.update._inner
    if dist.get_rank() == 1:
        inner.step = lambda: (_ for _ in ()).throw(MemoryError("in the middle of an update"))
    engine.step()
    try:
        WAYS_TO_NOTICE[way](engine, folder)
        text, cause = "", ""
    except RuntimeError as error:
        text, cause = f"{type(error).__name__}: {error}", repr(error.__cause__)
    inner.__dict__.pop("step", None)
    if way == "destroy":
        return {"said": text, "cause": cause, "found": None}
    engine.load_checkpoint(folder, tag="good")
    for step in range(1, DELAYED.steps):
        train(engine, step)
        engine.step()
    result = whole_params(engine.module)
    engine.destroy()
    return {"said": text, "cause": cause, "found": result}


@pytest.mark.parametrize("way", WAYS_TO_NOTICE)
@pytest.mark.parametrize("case", [(1, "cpu", "none"), (3, "cpu", "cpu"), (2, "nvme", "none")], ids=str)
def test_failure_raises_on_all_ranks(case: tuple[int, str, str], way: str, tmp_path: Any) -> None:
    setting = late(case, tmp_path)
    first, second = run_ranks(failing, 2, setting, way, str(tmp_path), env=LATE, transport="shm")
    assert second["said"].startswith("UpdateError: ") and "in the middle of an update" in second["said"]
    assert second["cause"] == "MemoryError('in the middle of an update')"
    assert first["said"].startswith("UpdateError: ") and "1 of the other ranks" in first["said"]
    if way != "destroy":
        requested = expected("mlp", replace(DELAYED, finished_after=(0,))).params
        assert relative_error(first["found"], requested)[0] <= FP32_BOUND


def disk_goes(setting: Setting, how: str, way: str, folder: str) -> list[str]:
    """Return the errors of calls after a disk failure in the update in flight."""
    subject = specimen("mlp")
    engine = start(subject, ds_config(DELAYED, setting))
    whole_step(subject, engine, 0)
    breaker = Breaker(engine)
    try:
        whole_step(subject, engine, 1, breaker, "step", how)
        engine._sharded.wait_for_update()
        breaker.mend()
        text = attempt(lambda: WAYS_TO_NOTICE[way](engine, folder))
    except StorageError as error:  # the update of the first step was still in flight
        breaker.mend()
        text = f"{type(error).__name__}: {error}"
    return [text, attempt(lambda: engine.save_checkpoint(folder)), attempt(engine.destroy)]


@pytest.mark.parametrize(
    ("case", "how", "way"),
    [((2, "nvme", "none"), "read", "step"), ((1, "nvme", "none"), "write", "finish_update"),
     ((3, "nvme", "nvme"), "gone", "step"), ((3, "cpu", "nvme"), "write", "step")],
)  # fmt: skip
def test_disk_failure_during_the_update_raises(
    case: tuple[int, str, str], how: str, way: str, transport: str, tmp_path: Any
) -> None:
    setting = late(case, tmp_path)
    for first, save, destroy in run_ranks(disk_goes, 2, setting, how, way, str(tmp_path / "saved"), env=LATE,
                                          transport=transport):  # fmt: skip
        assert first.startswith("StorageError: ") and "EIO" in first and "load the last checkpoint" in first, first
        assert save.startswith("CheckpointError: nothing is saved"), save
        assert destroy == ""


def left_alone(setting: Setting) -> int:
    """Drop an engine during an update. The thread of the update ends by itself."""
    import gc

    engine = engine_of(setting)
    train(engine, 0)
    engine.step()
    model = engine._sharded
    model.delayed_update.wait()
    del engine, model
    gc.collect()
    for thread in [item for item in threading.enumerate() if item.name.startswith("windlass-update")]:
        thread.join(60)
    return sum(item.name.startswith("windlass-update") for item in threading.enumerate())


def test_garbage_collected_engine_leaves_no_thread(tmp_path: Any) -> None:
    assert run_ranks(left_alone, 1, late((3, "cpu", "cpu"), tmp_path), env=LATE) == [0]


def refused(optimizer: str) -> str:
    recipe = replace(DELAYED, optimizer=optimizer, optimizer_params=(("lr", 1e-3),))
    model = specimen("mlp").build()
    import windlass

    config = ds_config(recipe, late((2, "cpu", "none"), ""))
    given = None
    if optimizer == "Adafactor":  # a configuration can't name Adafactor
        config.pop("optimizer")
        given = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    try:
        windlass.initialize(model=model, optimizer=given, config=config)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(("optimizer", "kind"), [("Lamb", "ConfigError"), ("Adafactor", "ModelError")])
def test_optimizer_of_whole_parameters_is_refused(optimizer: str, kind: str) -> None:
    (text,) = run_ranks(refused, 1, optimizer)
    named = "a delayed step cannot gather parameters" if kind == "ConfigError" else "whole parameters"
    assert text.startswith(kind) and named in text, text
