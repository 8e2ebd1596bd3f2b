"""Tests of `windlass verify`: healthy runs pass, and each planted fault is located by its first tensor and phase."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import oracle
from tests.dist.equivalence_runs import SGD, Setting, adamw, ds_config, specimen
from tests.dist.harness import RankError
from tests.dist.test_offload import LATE, offload_to
from tests.dist.verified_runs import verify, verify_training
from tests.hf_models import HF_ZOO
from tests.models import ZOO, Place
from tests.oracle import Recipe

ADAMW = Recipe(accumulation=2, steps=3, optimizer="AdamW", optimizer_params=(("lr", 1e-3),), clipping=0.1)


def verdict(name: str, stage: int, recipe: Recipe = ADAMW, **more: Any) -> dict[str, Any]:
    """Return the verdict on a specimen under a recipe."""
    own = {key: more.pop(key) for key in ("zero", "config") if key in more}
    config = ds_config(recipe, Setting(stage, **own))
    return verify(name, config, ranks=recipe.ranks, steps=recipe.steps, dtype=recipe.dtype, **more)


def assert_equal(found: dict[str, Any], steps: int = 3) -> None:
    """Assert that nothing deviates, every phase of every step was compared, and the forward has equal bits."""
    assert found["equal"], found["deviations"][:3]
    assert len(found["steps"]) == steps
    for row in found["steps"]:
        assert row["worst_ratios"]["forward"] == 0
        if row["plain_loss"] is not None:  # the model returned its loss
            assert row["loss"] == pytest.approx(row["plain_loss"], abs=1e-6)
        assert {"gradient", "update"} <= row["worst_ratios"].keys()
        assert not row["applied"] or {"reduce", "clip"} <= row["worst_ratios"].keys()


# For each fault: the ZeRO stage, and the expected step, phase, tensor, module and words of the hint.
FOUND: dict[str, tuple[int, int, str, str, str, str]] = {
    "missing_reduce": (2, 1, "reduce", "embed.weight", "embed (Embedding)", "only rank 0's part"),
    "doubled_scale": (3, 1, "reduce", "embed.weight", "embed (Embedding)", "2 times"),
    "doubled_loss": (1, 1, "gradient", "the loss", "the model itself (Tied)", "2, and the loss scale is 1"),
    "untied_weight": (3, 0, "start", "head.weight", "head", "'embed.weight' in the plain"),
    "untied_gradient": (2, 1, "gradient", "embed.weight", "embed (Embedding)", ""),
    "stale_gather": (
        2,
        2,
        "forward",
        "blocks.1.up.bias",
        "blocks.1.up (Linear)",
        "differs from that after the last step",
    ),
    "kept_gather": (3, 3, "forward", "embed.weight", "embed (Embedding)", "differs from that after the last step"),
    "wrong_clip": (1, 1, "clip", "clip coefficient", "the model itself (Tied)", "0.5 times"),
    "wrong_norm": (0, 1, "clip", "gradient norm", "the model itself (Tied)", "1.414 times"),
    "skipped_update": (1, 1, "update", "embed.weight", "embed (Embedding)", "has not changed since before the step"),
    "wrong_divisor": (3, 1, "update", "embed.weight", "embed (Embedding)", ""),
}


def assert_found(fault: str) -> None:
    stage, step, phase, tensor, module, hint = FOUND[fault]
    result = verdict("tied", stage, fault=fault, transport="gloo" if fault == "kept_gather" else "shm")
    assert not result["equal"]
    first = result["deviations"][0]
    assert (first["step"], first["phase"], first["tensor"], first["module"]) == (step, phase, tensor, module)
    assert (hint in first["hint"] if hint else not first["hint"]) and first["ulps"] > 100 and first["relative"] > 1e-7
    assert len(result["steps"]) == step, "it went on after the first step that deviates"


def test_correct_run_is_equal_and_a_missing_reduction_is_found(transport: str) -> None:
    if transport == "gloo":
        assert_equal(verdict("tied", 3, transport=transport))
    else:
        assert_found("missing_reduce")


@pytest.mark.slow
@pytest.mark.parametrize("fault", sorted(FOUND))
def test_every_injected_fault_is_located(fault: str) -> None:
    assert_found(fault)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "transport"), [(0, "gloo"), (1, "shm"), (2, "gloo"), (3, "shm"), (3, "gloo")])
@pytest.mark.parametrize("name", [*ZOO, *HF_ZOO])
def test_every_specimen_is_equal(name: str, stage: int, transport: str) -> None:
    traits = specimen(name).traits
    if name == "gradient_penalty":
        with pytest.raises(RankError, match="create_graph=True"):
            verdict(name, stage)
        return
    recipe = Recipe(1 if name == "mlp" else 2, 1 if "once" in traits else 2, 3, "fp32", "AdamW", (("lr", 1e-3),))
    assert_equal(verdict(name, stage, recipe, transport=transport))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["tied", "frozen", "checkpoint", "llama"])
def test_16_bit_models_are_equal(name: str, stage: int, precision: str) -> None:
    recipe = Recipe(2, 2, 4, precision, "AdamW", (("lr", 1e-3),))
    assert_equal(verdict(name, stage, recipe), steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_skipped_steps_are_reported_and_equal(stage: int) -> None:
    recipe = Recipe(2, 2, 3, "fp16", "AdamW", (("lr", 1e-3),))
    config = (("fp16", {"enabled": True, "initial_scale_power": 40}),)
    result = verdict("tied", stage, recipe, config=config)
    assert_equal(result)
    assert not any(row["applied"] for row in result["steps"])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "case", [(1, "cpu", "none"), (2, "nvme", "none"), (3, "cpu", "cpu"), (3, "nvme", "nvme")], ids=str
)
def test_offloaded_runs_are_equal(case: tuple[int, str, str], precision: str, tmp_path: Path) -> None:
    stage, state, param = case
    recipe = Recipe(2, 2, 3, precision, "AdamW", (("lr", 1e-3),))
    assert_equal(verdict("tied", stage, recipe, zero=offload_to(state, param, str(tmp_path)), env=LATE))


@pytest.mark.slow
def test_delayed_updates_are_compared_with_a_note() -> None:
    zero = (("offload_optimizer", {"device": "cpu", "delayed_update": True}),)
    result = verdict("tied", 2, zero=zero, env=LATE)
    assert_equal(result)
    assert any(note.startswith("delayed_update") for note in result["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("optimizer", ["SGD", "Muon", "Lamb", "Lion", "Adagrad"])
def test_other_optimizers_are_equal(optimizer: str, stage: int) -> None:
    params = SGD if optimizer == "SGD" else (("lr", 1e-3),)
    assert_equal(verdict("tied", stage, Recipe(2, 2, 3, "fp32", optimizer, params)))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("stage", [0, 3])
def test_other_numbers_of_ranks_are_equal(ranks: int, stage: int) -> None:
    assert_equal(verdict("tied", stage, Recipe(ranks, 2, 3, "fp32", "AdamW", adamw(specimen("tied")))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "key"), [(3, "zero_hpz_partition_size"), (3, "mics_shard_size"), (2, "mics_shard_size")]
)
def test_replicas_are_equal(stage: int, key: str) -> None:
    assert_equal(verdict("tied", stage, replace(ADAMW, ranks=4), zero=((key, 2),)))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_autocast_is_equal(stage: int) -> None:
    config = (("torch_autocast", {"enabled": True, "dtype": "bfloat16"}),)
    result = verdict("tied", stage, config=config)
    assert_equal(result)
    assert "bf16" in result["tolerances"]["forward"]


@pytest.mark.parametrize(
    ("precision", "config"),
    [
        ("fp32", (("gradient_allreduce_op", "sum"), ("managed_gradient_accumulation", False))),
        ("bf16", (("bf16", {"enabled": True, "bf16_master_weights_and_grads": True}),)),
        (
            "bf16",
            (("bf16", {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}),),
        ),
    ],
    ids=["sum", "bf16 masters", "bf16 states"],
)
def test_other_accumulation_and_master_dtypes_are_equal(precision: str, config: Any) -> None:
    recipe = Recipe(2, 1, 3, precision, "AdamW", (("lr", 1e-3), ("eps", 1e-4)))
    assert_equal(verdict("mlp", 1, recipe, config=config))


def test_the_bound_of_a_sum_does_not_hide_a_lost_part() -> None:
    """The tolerance of the reduce phase allows for rounding only, so losing 1e-5 of a gradient exceeds it."""
    from windlass.verify.tolerance import Tolerance

    assert Tolerance(torch.float32, torch.float32, torch.float32, 1 << 20, 64).reduce < 1e-5


def train_with_drops(door: str, config: dict[str, Any]) -> None:
    """Run a script that drops gradients of the first micro-batch in every step.

    By `door`, "optimizer" and "module" call their `zero_grad`, and "one" sets one parameter's `.grad` to None.
    """
    import windlass

    subject, rank = specimen("tied"), dist.get_rank()
    engine, optimizer = windlass.initialize(model=oracle.build(subject, rank), config=config)[:2]
    for step in range(3):
        engine.backward(engine(**subject.batch(Place(step, 0, rank))))
        if door == "optimizer":
            optimizer.zero_grad()
        loss = engine(**subject.batch(Place(step, 1, rank)))
        if door == "module":  # between forward and backward
            engine.module.zero_grad()
        if door == "one":
            engine.module.embed.weight.grad = None
        engine.backward(loss)
        engine.step()


@pytest.mark.parametrize("door", ["optimizer", "module", "one"])
def test_dropped_gradients_are_dropped_in_the_plain_copy(door: str) -> None:
    config = ds_config(Recipe(optimizer_params=SGD), Setting(2))
    if door == "one":
        with pytest.raises(RankError, match="'embed.weight' was dropped or set to zero while others were kept"):
            verify_training(train_with_drops, door, config)
    else:
        assert_equal(verify_training(train_with_drops, door, config)[0])
