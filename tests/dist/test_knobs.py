"""Knobs that say how, not what: the result stays the oracle's under each of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.harness import RankError, run_ranks
from tests.dist.laws import Setting, ds_config, hold, specimen, start
from tests.models import Place
from tests.oracle import Recipe

ZERO_KNOBS: list[tuple[str, Any]] = [
    ("reduce_scatter", False),
    ("allgather_partitions", False),
    ("contiguous_gradients", False),
    ("round_robin_gradients", True),
    ("sub_group_size", 100),
    ("reduce_bucket_size", 1),
    ("allgather_bucket_size", 1),
    ("stage3_prefetch_bucket_size", 100),
    ("stage3_max_live_parameters", 500),
    ("stage3_max_reuse_distance", 500),
    ("merge_below", 10**9),
]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("knob", ZERO_KNOBS, ids=lambda knob: f"{knob[0]}={knob[1]}")
def test_a_knob_of_zero_changes_no_result(knob: tuple[str, Any], stage: int) -> None:
    transport = "shm" if stage == 2 else "gloo"
    recipe = Recipe(ranks=2, accumulation=2, steps=3)
    hold("tied", recipe, Setting(stage=stage, transport=transport, zero=(knob,)))


SCALES: list[tuple[tuple[str, Any], ...]] = [
    (("prescale_gradients", True),),
    (("gradient_predivide_factor", 4.0),),
    (("communication_data_type", "fp32"),),
]


@pytest.mark.parametrize("scale", SCALES, ids=lambda scale: "+".join(f"{k}={v}" for k, v in scale))
def test_scaling_before_or_after_the_reduction(scale: tuple[tuple[str, Any], ...], stage: int, transport: str) -> None:
    recipe = Recipe(ranks=3, accumulation=2, steps=3)
    hold("mlp", recipe, Setting(stage=stage, transport=transport, config=scale))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gradients_may_travel_in_16_bits(dtype: str, stage: int, transport: str) -> None:
    recipe = Recipe(ranks=2, steps=3)
    setting = Setting(stage=stage, transport=transport, config=(("communication_data_type", dtype),))
    hold("mlp", recipe, setting, exact=False)


@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
def test_gradients_may_be_accumulated_in_either_dtype(grad_dtype: str, stage: int, transport: str) -> None:
    recipe = Recipe(ranks=2, accumulation=2, steps=3, precision="bf16")
    config = (("data_types", {"grad_accum_dtype": grad_dtype}),)
    hold("mlp", recipe, Setting(stage=stage, transport=transport, config=config))


SHARDINGS: list[tuple[int, tuple[str, int]]] = [
    (3, ("zero_hpz_partition_size", 2)),
    (1, ("mics_shard_size", 2)),
    (2, ("mics_shard_size", 2)),
    (3, ("mics_shard_size", 2)),
    (3, ("mics_shard_size", 1)),
    (3, ("mics_shard_size", 4)),
]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("sharding", SHARDINGS, ids=lambda s: f"stage{s[0]}-{s[1][0]}={s[1][1]}")
def test_cuts_over_fewer_ranks(sharding: tuple[int, tuple[str, int]], accumulation: int, transport: str) -> None:
    """hpZ gathers again from a smaller group; MiCS keeps replicas of a cut state."""
    stage, knob = sharding
    recipe = Recipe(ranks=4, accumulation=accumulation, steps=3)
    hold("cross_attention", recipe, Setting(stage=stage, transport=transport, zero=(knob,)))


def start_only(config: dict[str, Any]) -> None:
    start(specimen("mlp"), config).destroy()


def test_a_shard_size_that_does_not_divide_the_world_is_refused() -> None:
    config = ds_config(Recipe(), Setting(stage=3, zero=(("mics_shard_size", 2),)))
    with pytest.raises(RankError, match="mics_shard_size") as caught:
        run_ranks(start_only, 3, config)
    assert "ConfigError" in caught.value.kinds


def unused_is_an_error(stage: int) -> str:
    setting = Setting(stage=stage, zero=(("ignore_unused_parameters", False),))
    subject = specimen("unused_always")
    engine = start(subject, ds_config(Recipe(), setting))
    try:
        subject.train(engine, subject.batch(Place(0, 0, 0)), engine.backward)
        engine.step()
    except Exception as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_unused_parameters_are_named_when_they_are_not_to_be_ignored(stage: int) -> None:
    for said in run_ranks(unused_is_an_error, 2, stage):
        assert "forgotten" in said or "blocks.1" in said
