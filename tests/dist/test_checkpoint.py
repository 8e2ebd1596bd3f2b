"""Tests of checkpoints: exact resume, tags, other world sizes, saves and loads within a step, and refused calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import oracle
from tests.dist.equivalence_runs import ADAMW, Setting, ds_config, specimen, whole_params
from tests.dist.harness import run_ranks
from tests.models import Place, cast
from tests.oracle import Recipe, relative_error
from windlass.compat.checkpoint.recovery_scripts import SCRIPTS

SCHEDULE = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_num_steps": 6}}


def engine_for(name: str, recipe: Recipe, setting: Setting, seed: int) -> Any:
    import windlass

    config = {**ds_config(recipe, setting), "scheduler": SCHEDULE}
    if recipe.precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 3}
    return windlass.initialize(model=oracle.build(specimen(name), seed + dist.get_rank()), config=config)[0]


def steps(engine: Any, name: str, recipe: Recipe, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        for micro in range(recipe.accumulation):
            batch = cast(specimen(name).batch(Place(step, micro, dist.get_rank())), recipe.dtype)
            losses.append(float(specimen(name).train(engine, batch, engine.backward)))
            engine.step()
    return losses


def interrupted(name: str, recipe: Recipe, setting: Setting, folder: str) -> dict[str, Any]:
    """Train 2 + 3 steps with a save in between, then load into another engine and repeat the last 3."""
    engine = engine_for(name, recipe, setting, 0)
    steps(engine, name, recipe, 0, 2)
    engine.save_checkpoint(folder, client_state={"epoch": 7, "words": ["a", "b"]})
    expected = steps(engine, name, recipe, 2, 5)
    params = whole_params(engine.module)
    rates = engine.get_lr()
    engine.destroy()
    other = engine_for(name, recipe, setting, 50)
    path, client_state = other.load_checkpoint(folder)
    counts = (other.global_steps, other.micro_steps, other.global_samples)
    actual = steps(other, name, recipe, 2, 5)
    result = {
        "path": path,
        "client_state": client_state,
        "counts": counts,
        "wanted": expected,
        "found": actual,
        "error": relative_error(whole_params(other.module), params)[0],
        "rates": (rates, other.get_lr()),
    }
    other.destroy()
    return result


CASES = [
    ("tied", Recipe(accumulation=2, optimizer="AdamW", optimizer_params=(("lr", 1e-2),))),
    ("lora", Recipe(precision="bf16", optimizer="AdamW", optimizer_params=(("lr", 1e-2),))),
    ("batch_norm", Recipe()),
    ("odd_shapes", Recipe(precision="fp16")),
    ("mlp", Recipe(optimizer="Muon", optimizer_params=(("lr", 1e-2),))),
]


@pytest.mark.parametrize(("name", "recipe"), CASES, ids=[f"{n}-{r.precision}-{r.optimizer}" for n, r in CASES])
def test_resumed_training_is_bitwise_equal(name: str, recipe: Recipe, stage: int, tmp_path: Path) -> None:
    for result in run_ranks(interrupted, 2, name, recipe, Setting(stage=stage), str(tmp_path)):
        assert result["client_state"] == {"epoch": 7, "words": ["a", "b"]}
        assert Path(result["path"]).is_relative_to(tmp_path)
        assert result["counts"][:2] == (2, 2 * recipe.accumulation)
        assert result["found"] == result["wanted"]
        assert result["error"] == 0.0
        assert result["rates"][0] == result["rates"][1]
    assert (tmp_path / "latest").read_text() == "global_step2"
    suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file() and path.name not in SCRIPTS}
    assert suffixes <= {".safetensors", ".json", ""}, "safetensors and JSON only"


def tagged(folder: str, empty: str) -> dict[str, Any]:
    recipe, setting = Recipe(), Setting(stage=2)
    engine = engine_for("mlp", recipe, setting, 0)
    nothing = engine.load_checkpoint(empty)
    first = whole_params(engine.module)
    engine.save_checkpoint(folder, tag="first")
    steps(engine, "mlp", recipe, 0, 1)
    second = whole_params(engine.module)
    engine.save_checkpoint(folder, tag="second", save_latest=False)
    engine.load_checkpoint(folder)
    latest = relative_error(whole_params(engine.module), first)[0]
    engine.load_checkpoint(folder, tag="second")
    named = relative_error(whole_params(engine.module), second)[0]
    missing = ""
    try:
        engine.load_checkpoint(folder, tag="third")
    except Exception as error:
        missing = f"{type(error).__name__}: {error}"
    engine.destroy()
    return {"nothing": nothing, "latest": latest, "named": named, "missing": missing}


def test_tags_and_the_latest_file(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for result in run_ranks(tagged, 2, str(tmp_path / "saved"), str(tmp_path / "empty")):
        assert tuple(result["nothing"]) == (None, None)
        assert result["latest"] == 0.0 and result["named"] == 0.0
        assert "third" in result["missing"]
    assert (tmp_path / "saved" / "latest").read_text() == "first"


def with_a_strange_state(folder: str, blocking: bool) -> str:
    """Return the error if one rank's optimizer has a state that can be neither sharded nor gathered."""
    engine = engine_for("mlp", Recipe(optimizer="AdamW", optimizer_params=ADAMW), Setting(stage=2), 0)
    steps(engine, "mlp", Recipe(), 0, 1)
    states = engine._sharded.update.state_offload.states
    if dist.get_rank() == 0:
        next(iter(states.values()))["odd"] = torch.zeros(3)
    text = ""
    try:
        engine.save_checkpoint(folder, blocking=blocking)
    except windlass_error("CheckpointError") as error:
        text = str(error)
    engine.destroy()
    return text


@pytest.mark.parametrize("blocking", [True, False])
def test_unshardable_state_is_refused_by_name_on_all_ranks(blocking: bool, tmp_path: Path) -> None:
    for text in run_ranks(with_a_strange_state, 2, str(tmp_path), blocking):
        assert "rank 0: optimizer state 'odd' of '" in text and "has shape (3,): AdamW" in text
    assert not list(tmp_path.iterdir())


def saved_at(stage: int, folder: str) -> dict[str, Any]:
    engine = engine_for("mlp", Recipe(), Setting(stage=stage), 0)
    steps(engine, "mlp", Recipe(), 0, 2)
    engine.save_checkpoint(folder)
    params = whole_params(engine.module)
    engine.destroy()
    return params


def loaded_at(stage: int, folder: str) -> dict[str, Any]:
    engine = engine_for("mlp", Recipe(), Setting(stage=stage), 70)
    engine.load_checkpoint(folder)
    params = whole_params(engine.module)
    engine.destroy()
    return params


def windlass_error(name: str) -> type[Exception]:
    """Return an error class of the package. It is imported at the call, on the rank."""
    from windlass.base import errors

    kind: type[Exception] = getattr(errors, name)
    return kind


@pytest.mark.parametrize(("stage", "other"), [(2, 2), (2, 3), (3, 1)])
def test_checkpoint_loads_exactly_on_another_world_size(stage: int, other: int, tmp_path: Path) -> None:
    expected = run_ranks(saved_at, 2, stage, str(tmp_path))[0]
    for params in run_ranks(loaded_at, 3, other, str(tmp_path)):
        assert relative_error(params, expected)[0] == 0.0


def exported(folder: str, setting: Setting) -> dict[str, Any]:
    engine = engine_for("tied", Recipe(precision="bf16"), setting, 0)
    steps(engine, "tied", Recipe(precision="bf16"), 0, 1)
    wrote = engine.save_16bit_model(folder, "model.safetensors")
    state = engine.full_state_dict()
    engine.destroy()
    return {"wrote": wrote, "state": state}


def test_save_16bit_model_writes_the_full_model(stage: int, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    setting = Setting(stage=stage, zero=(("stage3_gather_16bit_weights_on_model_save", True),))
    result = run_ranks(exported, 2, str(tmp_path), setting)
    assert all(rank["wrote"] for rank in result)
    saved = load_file(tmp_path / "model.safetensors")
    state = result[0]["state"]
    model = specimen("tied").build()
    assert {name for name, _ in model.named_parameters()} <= saved.keys() <= state.keys()
    model.load_state_dict({**saved, **{k: v for k, v in state.items() if k not in saved}}, strict=True)
    for name, value in saved.items():
        assert value.dtype == state[name].dtype and bool((value == state[name]).all()), name


def moved(engine: Any, scales: list[float]) -> float:
    """Return the model's weight after micro-batches whose losses are multiplied by `scales`."""
    for scale in scales:
        engine.backward(engine(torch.ones(1, 1)).sum() * scale)
        engine.step()
    return float(whole_params(engine.module)["weight"])


def within_a_step(stage: int, folder: str) -> dict[str, Any]:
    """Load and save while a step is in progress."""
    import windlass

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = windlass.initialize(model=torch.nn.Linear(1, 1, bias=False), config=config)[0]
    before = moved(engine, [])
    engine.save_checkpoint(folder, tag=7)
    moved(engine, [1000.0])
    engine.load_checkpoint(folder, tag=7)
    after_load = moved(engine, [1.0, 1.0]) - before
    engine.load_checkpoint(folder)
    moved(engine, [5.0])
    engine.save_checkpoint(folder, tag="in a step")
    engine.destroy()
    other = windlass.initialize(model=torch.nn.Linear(1, 1, bias=False), config=config)[0]
    other.load_checkpoint(folder)
    half, after_save = moved(other, [1.0]) - before, moved(other, [1.0]) - before
    other.destroy()
    return {"after_load": after_load, "half": half, "after_save": after_save}


@pytest.mark.parametrize("stage", [1, 3])
def test_load_starts_a_new_step(stage: int, tmp_path: Path) -> None:
    for result in run_ranks(within_a_step, 2, stage, str(tmp_path)):
        assert result["after_load"] == pytest.approx(-1.0), "gradients of before the load"
        assert result["half"] == 0.0, "half a step was taken for a whole one"
        assert result["after_save"] == pytest.approx(-1.0)


def separate_directories(folder: str) -> list[str]:
    """Return the errors for ranks that load from different directories, and for an invalid client state."""
    engine = engine_for("mlp", Recipe(), Setting(stage=0), 0)
    engine.save_checkpoint(folder)
    text = []
    for act in (
        lambda: engine.load_checkpoint(folder if dist.get_rank() == 0 else f"{folder}/elsewhere"),
        lambda: engine.save_checkpoint(folder, client_state=[1]),
    ):
        try:
            act()
        except windlass_error("CheckpointError") as error:
            text.append(str(error))
    engine.destroy()
    return text


def test_ranks_with_different_directories_all_raise(tmp_path: Path) -> None:
    for text in run_ranks(separate_directories, 2, str(tmp_path)):
        assert "failed on rank 1: the checkpoint directory" in text[0] and "elsewhere does not exist" in text[0]
        assert text[1] == "client_state is a list; give a dict of plain data"
