"""Tests that offload changes only the tier of data, on an emulated device with memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

import windlass
from tests import oracle
from tests.custom_optimizers import Foreign
from tests.dist.equivalence_runs import (
    ADAMW,
    RankTrace,
    Setting,
    bitwise_difference,
    complaints,
    ds_config,
    expected,
    specimen,
    start,
    train_rank_in_turn,
    whole_params,
)
from tests.dist.harness import run_ranks
from tests.dist.quick_rows import in_shares, share
from tests.dist.test_hybrid_generation import PROMPT, training_engine
from tests.models import Place, cast
from tests.oracle import Recipe, relative_error
from windlass.base.device_memory import EmulatedDeviceMemory
from windlass.base.errors import ConfigError, ModelError
from windlass.compat.pickled_classes import OffloadStateTypeEnum
from windlass.engine.training_engine import Engine

BUDGET = str(64 << 20)
LATE = {"WINDLASS_EMULATE_DEVICE": BUDGET, "WINDLASS_EMULATE_LATE": "1"}
EMULATED = {"WINDLASS_EMULATE_DEVICE": BUDGET}


def offload_to(state: str, param: str, folder: Any, **optimizer: Any) -> tuple[tuple[str, Any], ...]:
    """Return the offload sections of a configuration."""
    results: list[tuple[str, Any]] = []
    if state != "none":
        section = {"device": state, **optimizer}
        results.append(("offload_optimizer", section | ({"nvme_path": str(folder)} if state == "nvme" else {})))
    if param != "none":
        section = {"device": param}
        results.append(("offload_param", section | ({"nvme_path": str(folder)} if param == "nvme" else {})))
    return tuple(results)


PLACES = [(1, "gloo"), (2, "gloo"), (2, "shm")]  # ranks and transport; shm needs two ranks
CASES = [
    (0, "cpu", "none"),
    (0, "nvme", "none"),
    (1, "cpu", "none"),
    (2, "cpu", "none"),
    (3, "cpu", "none"),
    (3, "none", "cpu"),
    (3, "cpu", "cpu"),
    (1, "nvme", "none"),
    (2, "nvme", "none"),
    (3, "nvme", "cpu"),
    (3, "cpu", "nvme"),
    (3, "nvme", "nvme"),
]


def train_all(name: str, recipe: Recipe, settings: list[Setting], ranks: int, env: dict[str, str]) -> list[Any]:
    """Return traces by setting, then by rank."""
    named = [replace(s, config=(*s.config, ("comm", {"transport": s.transport}))) for s in settings]
    by_rank = run_ranks(train_rank_in_turn, ranks, name, recipe, named, env=env, timeout=60.0 * len(settings))
    return [[traces[number] for traces in by_rank] for number in range(len(settings))]


def hold(name: str, recipe: Recipe, settings: list[Setting], env: dict[str, str]) -> list[list[RankTrace]]:
    """Assert that training under each setting equals the oracle's."""
    requested = expected(name, recipe)
    traces = train_all(name, recipe, settings, recipe.ranks, env)
    for setting, actual in zip(settings, traces, strict=True):
        text = complaints(actual, requested, recipe)
        assert not text, f"{name} {recipe} {setting}:\n  " + "\n  ".join(text[:12])
    return traces


ENVIRONMENTS = {"late": LATE, "emulated": EMULATED, "no device of its own": {}}


@in_shares
@pytest.mark.parametrize("device", ENVIRONMENTS)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_tiers_do_not_change_results(place: tuple[int, str], device: str, every: bool, tmp_path: Any) -> None:
    """Every tier trains as the oracle. `make test` runs each tier once on each device and once in each of `PLACES`."""
    ranks, transport = place
    cases = share(CASES, PLACES.index(place) + list(ENVIRONMENTS).index(device), 3, every)
    recipe = Recipe(ranks=ranks, accumulation=2, steps=2, optimizer="AdamW", optimizer_params=ADAMW)
    settings = [Setting(stage=s, transport=transport, zero=offload_to(a, b, tmp_path)) for s, a, b in cases]
    hold("tied", recipe, settings, ENVIRONMENTS[device])


UNUSUAL = ["frozen", "layer_reuse", "unused_by_step", "checkpoint_reentrant", "lora", "odd_shapes"]


@pytest.mark.parametrize("name", UNUSUAL)
@in_shares
def test_unusual_models_on_other_tiers(name: str, transport: str, every: bool, tmp_path: Any) -> None:
    cases = share([(2, "cpu", "none"), (3, "nvme", "nvme"), (3, "cpu", "cpu")], UNUSUAL.index(name), 3, every)
    settings = [Setting(stage=s, transport=transport, zero=offload_to(a, b, tmp_path)) for s, a, b in cases]
    hold(name, Recipe(ranks=2, steps=2), settings, LATE)


@pytest.mark.parametrize("transport", [pytest.param("shm", marks=pytest.mark.slow), "gloo"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@in_shares
def test_16_bit_models_on_other_tiers(precision: str, transport: str, every: bool, tmp_path: Any) -> None:
    recipe = Recipe(ranks=2, accumulation=2, steps=2, precision=precision)
    cases = share(CASES, precision == "fp16", 2, every)
    settings = [Setting(stage=s, transport=transport, zero=offload_to(a, b, tmp_path)) for s, a, b in cases]
    hold("mlp", recipe, settings, LATE)


@pytest.mark.parametrize("optimizer", ["Lamb", "Muon", "Adagrad", "Adafactor"])
def test_any_optimizer_on_any_tier(optimizer: str, transport: str, tmp_path: Any) -> None:
    recipe = Recipe(ranks=2, steps=2, optimizer=optimizer, optimizer_params=(("lr", 1e-3),))
    cases = [(1, "none", "none"), (2, "cpu", "none"), (3, "nvme", "cpu")]
    settings = [Setting(stage=s, transport=transport, zero=offload_to(a, b, tmp_path)) for s, a, b in cases]
    plain, *others = train_all("mlp", recipe, settings, 2, LATE)
    for setting, result in zip(settings[1:], others, strict=True):
        assert not bitwise_difference(plain, result), setting


@in_shares
def test_tiers_agree_bitwise(transport: str, every: bool, tmp_path: Any) -> None:
    recipe = Recipe(ranks=2, accumulation=2, steps=2, optimizer="AdamW", optimizer_params=ADAMW)
    settings = [Setting(stage=3, transport=transport, zero=offload_to(a, b, tmp_path)) for a, b in
                [("none", "none"), ("cpu", "none"), ("cpu", "cpu"), ("nvme", "nvme")]]  # fmt: skip
    settings.append(
        Setting(stage=3, transport=transport, zero=offload_to("nvme", "nvme", tmp_path, gradient_device="nvme"))
    )
    settings.append(Setting(stage=3, transport=transport, zero=offload_to("cpu", "none", tmp_path, ratio=0.4)))
    settings.append(
        Setting(stage=3, transport=transport, zero=(*offload_to("nvme", "cpu", tmp_path), ("sub_group_size", 1500)))
    )
    first, *others = settings
    settings = [first, *share(others, transport == "shm", 2, every)]
    first, *others = train_all("four_blocks", recipe, settings, 2, LATE)
    for setting, result in zip(settings[1:], others, strict=True):
        assert not bitwise_difference(first, result), setting


def bytes_of(folder: str, state: str, param: str) -> dict[str, Any]:
    """Return bytes on the emulated device between steps and at the peak, bytes copied in the last step, and slots."""
    from windlass.base import device_memory

    subject = specimen("four_blocks")
    setting = Setting(stage=3, zero=(*offload_to(state, param, folder), ("stage3_max_reuse_distance", 0)))
    engine = start(subject, ds_config(Recipe(optimizer="AdamW", optimizer_params=ADAMW), setting))
    place = device_memory.emulated_device_memory()
    assert place is not None
    place.peak = place.used  # this process may have emulated a device before
    for step in range(2):
        device_memory.copy_counters.reset()
        subject.train(engine, subject.batch(Place(step, 0, torch.distributed.get_rank())), engine.backward)
        engine.step()
    report = engine.report()
    numel = sum(unit["elements"] for unit in report["units"])
    results = {"rest": place.used, "peak": place.peak, "slots": report["slots"], "numel": numel}
    results |= {"to_device": device_memory.copy_counters.to_device, "to_host": device_memory.copy_counters.to_host}
    engine.destroy()
    results["after"] = place.used
    return results


def test_device_contains_only_its_own_slots(tmp_path: Any) -> None:
    plain = run_ranks(bytes_of, 2, str(tmp_path), "none", "none", env=EMULATED, transport="gloo")[0]
    away = run_ranks(bytes_of, 2, str(tmp_path), "cpu", "cpu", env=EMULATED, transport="gloo")[0]
    assert {tier for (slot, tier) in away["slots"] if slot in ("exp_avg", "exp_avg_sq", "grad")} == {"host"}
    assert {tier for (_, tier) in plain["slots"]} == {"device"}
    # between steps the device holds the ring of gradient buffers, and gradients in transfer to the host
    assert away["rest"] < 0.35 * plain["rest"]
    assert away["peak"] < plain["peak"]
    assert away["after"] == plain["after"] == 0
    assert plain["to_device"] == plain["to_host"] == 0
    # Parameters are copied to the device twice a step (forward, backward), half of them per rank; half of the gradients
    # are copied to the host once.
    assert away["to_host"] == pytest.approx(4 * away["numel"] / 2, rel=0.01)
    assert away["to_device"] == pytest.approx(2 * 4 * away["numel"] / 2, rel=0.01)


def fill_up() -> str:
    subject = specimen("four_blocks")
    setting = Setting(stage=2)
    try:
        engine = start(subject, ds_config(Recipe(optimizer="AdamW", optimizer_params=ADAMW), setting))
        subject.train(engine, subject.batch(Place(0, 0, torch.distributed.get_rank())), engine.backward)
        engine.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_full_device_names_the_slot() -> None:
    for text in run_ranks(fill_up, 2, env={"WINDLASS_EMULATE_DEVICE": "20K"}, transport="gloo"):
        assert text.startswith("DeviceMemoryError") and "20,480" in text and "WINDLASS_EMULATE_DEVICE" in text


def park_between_steps(stage: int, parks: bool) -> RankTrace:
    """Train; if `parks`, offload all states and reload them after each step."""
    from windlass.base import device_memory

    subject = specimen("mlp")
    recipe = Recipe(optimizer="AdamW", optimizer_params=ADAMW, steps=3, precision="bf16")
    engine = start(subject, ds_config(recipe, Setting(stage=stage)))
    place = device_memory.emulated_device_memory()
    assert place is not None
    trace = RankTrace()
    for step in range(recipe.steps):
        batch = cast(subject.batch(Place(step, 0, torch.distributed.get_rank())), recipe.dtype)
        trace.losses.append([float(subject.train(engine, batch, engine.backward))])
        engine.step()
        if parks:
            before = place.used
            engine.offload_states()
            assert place.used < before
            with pytest.raises(ModelError, match="reload_states"):
                engine.step()
            if stage == 3:  # at lower stages all parameters stay on the device
                with pytest.raises(ModelError, match="reload_states"):
                    engine(**batch)
            engine.reload_states()
            assert place.used == before
    trace.params = whole_params(engine.module)
    if parks:
        compare_names_of_states(engine, place)
    engine.destroy()
    return trace


def compare_names_of_states(engine: Engine, place: EmulatedDeviceMemory) -> None:
    """Check that a kind of states and its DeepSpeed name move the same bytes, and that a repeated kind moves once."""

    def moved(*kinds: object) -> int:
        before = place.used
        engine.offload_states(include=kinds)
        freed = before - place.used
        engine.reload_states()
        return freed

    kinds = ("optimizer_states", "master_weights", "parameters", "gradients")
    sizes = [moved(kind) for kind in kinds]
    assert sizes == [
        moved(OffloadStateTypeEnum(name)) for name in ("optim_states", "hp_params", "lp_params", "lp_grads")
    ]
    assert sizes[0] > 0 and sizes[1] > 0 and moved("contiguous_grad_buffer") == 0
    assert moved("hp_params", "optim_states", *kinds) == sum(sizes)
    with pytest.raises(ConfigError, match="there is no kind 'weights'; use any of optimizer_states, "):
        engine.offload_states(include=["hp_params", "weights"])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_are_offloaded_and_reloaded(stage: int) -> None:
    still, moved = (
        run_ranks(park_between_steps, 2, stage, parks, env=LATE, transport="gloo") for parks in (False, True)
    )
    assert not bitwise_difference(still, moved)


def read_while_parked(stage: int, precision: Literal["fp32", "bf16"]) -> list[str]:
    """Access values whose tensors are offloaded. Return the names of the calls that did not raise, or lost values."""
    from windlass import zero

    subject = specimen("mlp")
    recipe = Recipe(optimizer="AdamW", optimizer_params=ADAMW, precision=precision)
    engine = start(subject, ds_config(recipe, Setting(stage=stage)))
    average = zero.ExponentialMovingAverage(engine, 0.5)
    batch = cast(subject.batch(Place(0, 0, torch.distributed.get_rank())), recipe.dtype)
    subject.train(engine, batch, engine.backward)
    engine.step()
    average.update()
    parameter = next(engine.module.parameters())
    weight, moment = zero.full_param(parameter).detach(), zero.full_state(parameter, "exp_avg")
    assert moment is not None

    saved = engine.optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 7.0

    def gather(rank: int | None) -> None:
        with zero.GatheredParameters([parameter], modifier_rank=rank), torch.no_grad():
            assert bool(parameter.isfinite().all())

    states: dict[str, Callable[[], Any]] = {
        "full_state": lambda: zero.full_state(parameter, "exp_avg"),
        "local_state": lambda: zero.local_state(parameter, "exp_avg"),
        "set_full_state": lambda: zero.set_full_state(parameter, "exp_avg", moment * 2),
        "set_local_state": lambda: zero.set_local_state(parameter, "exp_avg", moment * 2),
        "state_dict": engine.optimizer.state_dict,
        "load_state_dict": lambda: engine.optimizer.load_state_dict(saved),
    }
    weights: dict[str, Callable[[], Any]] = {
        "full_param": lambda: zero.full_param(parameter),
        "local_param": lambda: zero.local_param(parameter),
        "set_full_param": lambda: zero.set_full_param(parameter, weight * 2),
        "update": average.update,
        "modifier_rank": lambda: gather(0),
    }
    parameters: dict[str, Callable[[], Any]] = {"GatheredParameters": lambda: gather(None)} if stage == 3 else {}
    # The parameters of fp32 are the master weights: at stage 3 their shards move, at lower stages they stay.
    separate = precision == "bf16"
    plans: list[tuple[list[str], dict[str, Callable[[], Any]]]] = [
        (["optim_states"], states),
        (["hp_params"], weights if separate else {}),
        (["lp_params"], parameters | (weights if stage == 3 and not separate else {})),
    ]
    wrong = []
    calls = {**states, **weights, "GatheredParameters": lambda: gather(None)}
    changing = {"set_full_state", "set_local_state", "load_state_dict", "set_full_param", "update", "modifier_rank"}
    for kinds, refused in plans:
        engine.offload_states(include=kinds)
        for name, call in calls.items():
            if name in refused:
                try:
                    call()
                    wrong.append(f"{name} without {kinds}")
                except ModelError as error:
                    assert "are offloaded; call engine.reload_states() first" in str(error)
            elif name not in changing:
                call()  # what is on the device still works
        engine.reload_states()
    if engine.optimizer.param_groups[0]["lr"] == 7.0:
        wrong.append("the groups changed")
    if not torch.equal(weight, zero.full_param(parameter)):
        wrong.append("the weight changed")
    if not torch.equal(moment, zero.full_state(parameter, "exp_avg")):
        wrong.append("the moment changed")
    if not torch.equal(weight, average.full_param(parameter)):
        wrong.append("the average changed")
    engine.destroy()
    return wrong


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (3, "bf16"), (1, "fp32"), (3, "fp32")])
def test_offloaded_values_are_neither_read_nor_set(stage: int, precision: Literal["fp32", "bf16"]) -> None:
    for wrong in run_ranks(read_while_parked, 2, stage, precision, env=EMULATED, transport="gloo"):
        assert not wrong


def compute_while_parked(stage: int) -> list[str]:
    """Compute with a model whose parameters or gradients are offloaded. Return the names of the calls that were not
    refused although they need them, or returned other values.
    """
    engine = training_engine(stage, gradient_accumulation_steps=3, bf16={"enabled": True})
    ids = torch.tensor([PROMPT])
    parameter = next(engine.module.parameters())

    def loss() -> torch.Tensor:
        result: torch.Tensor = engine(input_ids=ids, labels=ids).loss
        return result

    engine.backward(loss())
    first = windlass.zero.full_grad(parameter)
    assert first is not None
    losses = [loss() for _ in range(2)]
    calls: dict[str, Callable[[], Any]] = {
        "engine": lambda: engine(input_ids=ids).logits,
        "module": lambda: engine.module(input_ids=ids).logits,
        "inner module": lambda: engine.module.model(input_ids=ids).last_hidden_state,
        "generate": lambda: engine.generate(ids, max_new_tokens=4, eos_token_id=None),
        "generate of the module": lambda: engine.module.generate(ids, max_new_tokens=4, eos_token_id=None),
    }
    backwards: dict[str, Callable[[], Any]] = {
        "engine.backward": lambda: engine.backward(losses[0]),
        "loss.backward": lambda: losses[1].backward(),
    }
    with torch.no_grad():
        expected = {name: call() for name, call in calls.items()}
    wrong = []

    def compare(name: str, call: Callable[[], Any], kind: str) -> None:
        try:
            with torch.set_grad_enabled(name in backwards):
                value = call()
            if kind or not torch.equal(value, expected[name]):
                wrong.append(f"{name} with offloaded {kind}")
        except ModelError as error:
            if not kind or f"the {kind} of " not in str(error) or "call engine.reload_states() first" not in str(error):
                wrong.append(f"{name}: {error}")

    for kind in ("optimizer_states", "parameters", "gradients"):
        engine.offload_states(include=[kind])
        for name, call in calls.items():
            compare(name, call, kind if kind == "parameters" and stage == 3 else "")
        if kind == "gradients" or (kind == "parameters" and stage == 3):
            for name, call in backwards.items():
                compare(name, call, kind)
        engine.reload_states()
    for name, call in calls.items():
        compare(name, call, "")
    second = windlass.zero.full_grad(parameter)
    if second is None or not torch.equal(first, second):
        wrong.append("the gradient changed")
    engine.offload_states(include=["optimizer_states"])
    engine.backward(loss())  # the same micro-batch again
    engine.reload_states()
    third = windlass.zero.full_grad(parameter)
    if third is None or not torch.equal(third, first * 2):
        wrong.append("a backward without optimizer states")
    engine.destroy()
    return wrong


@pytest.mark.parametrize("stage", [2, 3])
def test_offloaded_values_are_not_computed_with(stage: int) -> None:
    for wrong in run_ranks(compute_while_parked, 2, stage, env=EMULATED, transport="gloo", timeout=240):
        assert not wrong


def forward_with_local_weights(optimizer: str, params: dict[str, Any]) -> str:
    """Call an engine whose ranks take local steps while its optimizer states are offloaded. Return the error."""
    engine = training_engine(0, optimizer={"type": optimizer, "params": {"lr": 0.01, **params}}, bf16={"enabled": True})
    ids = torch.tensor([PROMPT])
    for _ in range(2):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.offload_states(include=["optimizer_states"])
    with pytest.raises(ModelError) as raised:
        engine(input_ids=ids)
    engine.reload_states()
    assert engine(input_ids=ids).logits.isfinite().all()
    engine.destroy()
    return str(raised.value)


@pytest.mark.parametrize(
    ("optimizer", "params"),
    [("DiLoCo", {"inner_steps": 4}), ("ZeroOneAdam", {"var_freeze_step": 1, "local_step_scaler": 4})],
)
def test_local_weights_need_offloaded_states(optimizer: str, params: dict[str, Any]) -> None:
    """A forward changes them from master weights and optimizer states."""
    for text in run_ranks(forward_with_local_weights, 2, optimizer, params, env=EMULATED, transport="gloo"):
        assert text == "forward: states are offloaded; call engine.reload_states() first"


def read_gradient_of_host() -> tuple[float, float]:
    """Return the norm of a gradient in host memory before and after `offload_states`."""
    from windlass import zero

    subject = specimen("mlp")
    recipe = Recipe(optimizer="AdamW", optimizer_params=ADAMW, precision="bf16")
    engine = start(subject, ds_config(recipe, Setting(stage=2, zero=offload_to("cpu", "none", ""))))
    subject.train(engine, cast(subject.batch(Place(0, 0, 0)), recipe.dtype), engine.backward)
    weight = list(engine.module.parameters())[1]

    def norm() -> float:
        gradient = zero.full_grad(weight)
        assert gradient is not None
        return float(gradient.norm())

    before = norm()
    engine.offload_states()
    after = norm()
    engine.reload_states()
    engine.destroy()
    return before, after


def test_gradients_that_were_offloaded_before_stay_readable() -> None:
    for before, after in run_ranks(read_gradient_of_host, 2, env=EMULATED, transport="gloo"):
        assert before == after > 0


def disk_bytes(folder: str, gradients: str) -> tuple[float, float]:
    """Return the disk traffic of a bf16 step, in bytes per local element, with and without memory for new parameters.

    New parameters that stay in memory are not read again in the next forward.
    """
    from windlass.zero.update import master_weights

    subject = specimen("four_blocks")
    recipe = Recipe(optimizer="AdamW", optimizer_params=ADAMW, precision="bf16")
    knobs = (*offload_to("nvme", "nvme", folder, gradient_device=gradients), ("stage3_max_reuse_distance", 0))
    engine = start(subject, ds_config(recipe, Setting(stage=3, zero=knobs)))
    disk, staging = engine._sharded.tiers.disk, engine._sharded.tiers.staging
    kept, moved = master_weights._KEPT, []
    for step in range(4):
        staging.wait_all()
        master_weights._KEPT = kept if step < 2 else 2.0
        disk.io_rates(reset=True)
        batch = cast(subject.batch(Place(step, 0, torch.distributed.get_rank())), recipe.dtype)
        subject.train(engine, batch, engine.backward)
        engine.step()
        staging.wait_all()  # the last writes continue after the step
        moved.append(disk.io_rates().disk_read_bytes + disk.io_rates().disk_write_bytes)
    master_weights._KEPT = kept
    numel = sum(unit["elements"] for unit in engine.report()["units"])
    engine.destroy()
    scale = torch.distributed.get_world_size() / numel
    return moved[1] * scale, moved[3] * scale


@pytest.mark.parametrize(("gradients", "most"), [("cpu", 30), ("nvme", 38)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_step_on_disk_transfers_the_expected_bytes(ranks: int, gradients: str, most: int, tmp_path: Any) -> None:
    """A step with all data on NVMe moves the minimal number of bytes per element.

    Parameters are read twice (4) and written once (2), master and moments are read and written (24), and so are
    gradients on NVMe (8). With memory for new parameters, parameters are read once: the next forward has them in
    memory.
    """
    for moved, tight in run_ranks(disk_bytes, ranks, str(tmp_path), gradients):
        assert moved == pytest.approx(most - 2, rel=0.01)
        assert tight == pytest.approx(most, rel=0.01)


def float64_losses(state: str) -> list[float]:
    """Train a float64 model, whose masters no native kernel supports."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)).double()
    config = ds_config(
        Recipe(optimizer="AdamW", optimizer_params=ADAMW), Setting(stage=2, zero=offload_to(state, "none", ""))
    )
    engine = windlass.initialize(model=model, config=config)[0]
    rows = torch.ones(2, 8, dtype=torch.float64)
    losses = []
    for _ in range(3):
        loss = (engine(rows) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def test_float64_in_host_memory() -> None:
    plain, away = (run_ranks(float64_losses, 2, state, env=EMULATED) for state in ("none", "cpu"))
    assert away == plain


def step_after_a_failure(state: str, folder: str, stage: int, fails: bool) -> dict[str, torch.Tensor]:
    """Return parameters after three steps. If `fails`, a step on another batch raises before the second step."""
    subject = specimen("mlp")
    recipe = Recipe(optimizer="SGD", optimizer_params=(("lr", 0.05),))
    knobs = (*offload_to(state, "none", folder), ("sub_group_size", 100))
    engine = start(subject, ds_config(recipe, Setting(stage=stage, zero=knobs)))
    inner = engine._sharded.update._inner
    full = type(inner).step
    for step in range(3):
        batch = subject.batch(Place(step, 0, torch.distributed.get_rank()))
        if fails and step == 1:
            other = subject.batch(Place(9, 0, torch.distributed.get_rank()))
            subject.train(engine, other, engine.backward)
            inner.step = lambda: (_ for _ in ()).throw(MemoryError("in the middle of a step"))
            with pytest.raises(MemoryError):
                engine.step()
            del inner.step
            engine.zero_grad()
        assert type(inner).step is full
        subject.train(engine, batch, engine.backward)
        engine.step()
    result = whole_params(engine.module)
    engine.destroy()
    return result


@pytest.mark.parametrize(("state", "stage"), [("cpu", 1), ("cpu", 2), ("nvme", 2)])
def test_failed_step_does_not_affect_the_next(state: str, stage: int, tmp_path: Any) -> None:
    ways = [run_ranks(step_after_a_failure, 2, state, str(tmp_path), stage, fails, env=LATE) for fails in (False, True)]
    for plain, again in zip(*ways, strict=True):
        assert all(torch.equal(plain[name], again[name]) for name in plain)


class Optional(torch.nn.Module):
    """Two parameters of one unit, one of which may be unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias, self.scale = torch.nn.Parameter(torch.randn(40)), torch.nn.Parameter(torch.randn(40))
        self.scales = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.bias
        return (x * self.scale if self.scales else x).float().square().mean()


def narrow_after_a_failure(state: str, folder: str, fails: bool) -> dict[str, torch.Tensor]:
    """Run two unclipped steps, the first with an unused parameter; if `fails`, a clipped step raises before them.

    Return masters and bf16 parameters.
    """
    recipe = Recipe(optimizer="AdamW", optimizer_params=ADAMW, precision="bf16")
    model = Optional()
    engine = windlass.initialize(
        model=model, config=ds_config(recipe, Setting(2, zero=offload_to(state, "none", folder)))
    )[0]
    rows = torch.linspace(-1, 1, 40, dtype=torch.bfloat16).repeat(2, 1)
    if fails:
        engine.backward(engine(rows) * 1e4)
        inner = engine._sharded.update._inner
        inner.step = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        del inner.step
        engine.zero_grad()
    for scales in (False, True):
        model.scales = scales
        engine.backward(engine(rows) * 1e-2)
        engine.step()
    result = whole_params(model) | {f"16 bits of {name}": value for name, value in engine.full_state_dict().items()}
    engine.destroy()
    return result


@pytest.mark.parametrize("state", ["none", "cpu", "nvme"])
def test_failed_step_leaves_no_divisor_and_no_copies(state: str, tmp_path: Any) -> None:
    plain, again = (
        run_ranks(narrow_after_a_failure, 2, state, str(tmp_path), fails, env=LATE) for fails in (False, True)
    )
    for item, other in zip(plain, again, strict=True):
        assert item.keys() == other.keys() and all(torch.equal(item[name], other[name]) for name in item)


class Growing(torch.nn.Module):
    """Parameters of one unit that are first used one after the other, the last of them first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (torch.nn.Parameter(torch.randn(4, 8)) for _ in range(3))
        # the units of these blocks have larger buffers
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 64), torch.nn.Linear(64, 8)])
        self.used = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](torch.tanh(self.blocks[0](x))) * self.third[0] + self.third.sum()
        x = x * self.second.mean(0) if self.used > 1 else x
        x = x + self.first.mean(0) if self.used > 2 else x
        return (x - 1).square().mean()


def growing(state: str, folder: str, optimizer: str, sub_group: int) -> dict[str, torch.Tensor]:
    """Return masters after steps in which new states are created before existing ones in a unit."""
    model = Growing()
    recipe = Recipe(optimizer=optimizer, optimizer_params=(("lr", 1e-2),))
    zero = (*offload_to(state, "none", folder), ("sub_group_size", sub_group))
    engine = windlass.initialize(model=model, config=ds_config(recipe, Setting(2, zero=zero)))[0]
    for step in range(4):
        model.used = 1 + step
        engine.backward(engine(torch.linspace(-1, 1, 8).roll(step).repeat(2, 1)))
        engine.step()
    result = whole_params(model)
    engine.destroy()
    return result


@pytest.mark.parametrize(("optimizer", "sub_group"), [("AdamW", 1 << 30), ("AdamW", 100), ("Muon", 1 << 30)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_delayed_reads_of_states_do_not_overwrite_newer_states_on_nvme(
    ranks: int, optimizer: str, sub_group: int, tmp_path: Any
) -> None:
    plain, away = (
        run_ranks(growing, ranks, state, str(tmp_path), optimizer, sub_group, env=LATE) for state in ("none", "nvme")
    )
    for item, other in zip(plain, away, strict=True):
        assert all(torch.equal(item[name], other[name]) for name in item)


class Hollow(torch.nn.Module):
    """Blocks without elements before and after a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        nothing = [torch.nn.ParameterDict({"none": torch.nn.Parameter(torch.empty(0))}) for _ in range(2)]
        self.blocks = torch.nn.ModuleList([nothing[0], torch.nn.Linear(8, 8), nothing[1]])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](x + self.blocks[0]["none"].sum()) + self.blocks[2]["none"].sum()
        return (x - 1).square().mean()


def hollow(stage: int, state: str, param: str, folder: str) -> dict[str, torch.Tensor]:
    model = Hollow()
    engine = windlass.initialize(
        model=model, config=ds_config(Recipe(), Setting(stage, zero=offload_to(state, param, folder)))
    )[0]
    for _ in range(3):
        engine.backward(engine(torch.linspace(-1, 1, 8).repeat(2, 1)))
        engine.step()
    result = whole_params(model)
    engine.destroy()
    return result


@pytest.mark.parametrize(("stage", "state", "param"), [(2, "cpu", "none"), (3, "cpu", "cpu"), (3, "nvme", "nvme")])
def test_units_without_elements_on_any_tier(stage: int, state: str, param: str, tmp_path: Any) -> None:
    plain = run_ranks(hollow, 2, 2, "none", "none", "", env=LATE)[0]
    for result in run_ranks(hollow, 2, stage, state, param, str(tmp_path), env=LATE):
        assert all(torch.equal(result[name], plain[name]) for name in plain)


def half_a_step(state: str, stage: int, folder: str) -> bool:
    """Return True if the model's parameters equal its masters after a step that failed at its second chunk."""
    subject = specimen("mlp")
    recipe = Recipe(optimizer="AdamW", optimizer_params=ADAMW)
    zero = (*offload_to(state, "none", folder), ("sub_group_size", 100))
    engine = start(subject, ds_config(recipe, Setting(stage=stage, zero=zero)))
    inner, parts = engine._sharded.update._inner, []

    def step() -> None:
        parts.append(None)
        if len(parts) == 2:
            raise KeyboardInterrupt
        type(inner).step(inner)

    subject.train(engine, subject.batch(Place(0, 0, 0)), engine.backward)
    inner.step = step
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    del inner.step
    engine.zero_grad()
    master_weights, computed = whole_params(engine.module), engine.full_state_dict()
    engine.destroy()
    return all(torch.equal(master_weights[name], computed[name]) for name in master_weights)


@pytest.mark.parametrize(("state", "stage"), [("cpu", 1), ("cpu", 2), ("nvme", 2)])
def test_parameters_updated_by_a_partial_step_are_published(state: str, stage: int, tmp_path: Any) -> None:
    assert all(run_ranks(half_a_step, 1, state, stage, str(tmp_path), env=LATE))


def reads_ahead(folder: str, edits: bool, accumulation: int) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Return the number of records prefetched in each backward, and the parameters after three steps."""
    subject = specimen("four_blocks")
    recipe = Recipe(optimizer="AdamW", optimizer_params=ADAMW, accumulation=accumulation)
    engine = start(subject, ds_config(recipe, Setting(stage=3, zero=offload_to("nvme", "nvme", folder))))
    residence, counts = engine._sharded.masters.state_offload, []
    for micro in range(3 * accumulation):
        batch = subject.batch(Place(micro, 0, torch.distributed.get_rank()))
        subject.train(engine, batch, engine.backward)
        counts.append(len(residence._fetched))
        if edits:  # the step must not start from the prefetched values
            parameter = next(engine.module.parameters())
            with windlass.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                parameter.add_(1.0)
        engine.step()
    result = whole_params(engine.module)
    engine.destroy()
    return counts, result


@pytest.mark.parametrize("ranks", [1, 2])
def test_records_are_read_during_the_backward(ranks: int, tmp_path: Any) -> None:
    """Records are prefetched in the last backward of a step only, since earlier reads would hold memory for longer."""
    for counts, _ in run_ranks(reads_ahead, ranks, str(tmp_path), False, 2, env=LATE):
        assert [count > 0 for count in counts] == [False, True] * 3


def test_prefetched_records_do_not_undo_an_edit(tmp_path: Any) -> None:
    on_disk = [result for _, result in run_ranks(reads_ahead, 2, str(tmp_path), True, 1, env=LATE)]
    alone = run_ranks(edits_between, 2, env=LATE)
    for offloaded, resident in zip(on_disk, alone, strict=True):
        assert all(torch.equal(offloaded[name], resident[name]) for name in resident)


def edits_between() -> dict[str, torch.Tensor]:
    """Train as `reads_ahead` does with edits, with everything on the device."""
    subject = specimen("four_blocks")
    engine = start(subject, ds_config(Recipe(optimizer="AdamW", optimizer_params=ADAMW), Setting(stage=3)))
    for micro in range(3):
        subject.train(engine, subject.batch(Place(micro, 0, torch.distributed.get_rank())), engine.backward)
        parameter = next(engine.module.parameters())
        with windlass.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter.add_(1.0)
        engine.step()
    result = whole_params(engine.module)
    engine.destroy()
    return result


class LateState(Foreign):
    """Optimizer whose momentum appears in the third step; afterwards the order of its two states changes each step."""

    def rule(self, p: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        seen = state.pop("seen", torch.zeros_like(p)).add_(gradient.abs())
        state["count"] = state.get("count", 0) + 1
        if state["count"] < 3:
            state["seen"], change = seen, gradient
        else:
            change = state.pop("momentum", torch.zeros_like(p)).mul_(0.9).add_(gradient)
            kept = [("momentum", change), ("seen", seen)]
            state.update(kept if state["count"] % 2 else reversed(kept))
        p.sub_(lr * (change / (1 + seen)))


def late_states(state: str, folder: str) -> dict[str, torch.Tensor]:
    """Return parameters after six steps of an optimizer whose states change their order."""
    subject = specimen("four_blocks")
    config = ds_config(Recipe(), Setting(stage=2, zero=offload_to(state, "none", folder)))
    config.pop("optimizer", None)
    engine = start(subject, config, optimizer=LateState)
    for micro in range(6):
        subject.train(engine, subject.batch(Place(micro, 0, torch.distributed.get_rank())), engine.backward)
        engine.step()
    result = whole_params(engine.module)
    engine.destroy()
    return result


@pytest.mark.parametrize("ranks", [1, 2])
def test_late_states_are_stored_on_disk(ranks: int, tmp_path: Any) -> None:
    expected, actual = (run_ranks(late_states, ranks, state, str(tmp_path), env=EMULATED) for state in ("none", "nvme"))
    for local, alone in zip(actual, expected, strict=True):
        assert all(torch.equal(local[name], alone[name]) for name in alone)


def without_memory(failing: int) -> tuple[list[int], float]:
    """Retry a batch after a gather ran out of memory.

    Return the number of users that keep each unit unsharded, and the difference from a run without the failure.
    """
    expected: dict[str, torch.Tensor] = {}
    for fails in (False, True):
        model = oracle.build(specimen("four_blocks"))
        for block in model.blocks:
            block.up.weight.requires_grad_(False)  # two units per block
        setting = Setting(stage=3, zero=offload_to("cpu", "cpu", ""))
        engine = windlass.initialize(model=model, config=ds_config(Recipe(), setting))[0]
        transport, batch = engine._sharded.transport, specimen("four_blocks").batch(Place(0, 0, 0))
        occupy, left = transport.allocate_memory, [failing]

        def full(buffer: Any, occupy: Any = occupy, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise torch.OutOfMemoryError("none left")
            occupy(buffer)

        if fails:
            transport.allocate_memory = full
            with pytest.raises(torch.OutOfMemoryError):
                engine.backward(engine(**batch))
            transport.allocate_memory = occupy
            engine.zero_grad()
        for _ in range(2):
            engine.backward(engine(**batch))
            engine.step()
        users = [unit.users for unit in engine._sharded.units]
        expected, before = whole_params(engine.module), expected
        engine.destroy()
    return users, relative_error(expected, before)[0]


@pytest.mark.parametrize("failing", [1, 2, 9])
def test_gather_out_of_memory_can_be_retried(failing: int) -> None:
    users, error = run_ranks(without_memory, 1, failing, env=LATE)[0]
    assert not any(users) and error == 0
