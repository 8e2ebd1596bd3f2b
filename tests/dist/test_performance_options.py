"""Tests that the results under each performance option equal the oracle's."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import windlass
from tests.dist.equivalence_runs import Setting, ds_config, hold_all, specimen, start
from tests.dist.harness import RankError, run_ranks
from tests.dist.quick_rows import in_shares, share
from tests.models import Place
from tests.oracle import Recipe
from windlass.zero.core.prefetcher import Prefetcher
from windlass.zero.core.unit import Unit

Knob = tuple[str, Any]

ZERO_KNOBS: list[Knob] = [
    ("reduce_scatter", False),
    ("allgather_partitions", False),
    ("contiguous_gradients", False),
    ("round_robin_gradients", True),
    ("sub_group_size", 100),
    ("reduce_bucket_size", 50),
    ("allgather_bucket_size", 7),
    ("stage3_prefetch_bucket_size", 100),
    ("stage3_max_live_parameters", 500),
    ("stage3_max_reuse_distance", 500),
    ("unit_merge_threshold", 10**9),
    ("blocks", ["Block"]),
]


@pytest.mark.parametrize("knob", ZERO_KNOBS, ids=lambda knob: f"{knob[0]}={knob[1]}")
@in_shares
def test_options_do_not_change_results(knob: Knob, every: bool) -> None:
    recipe = Recipe(ranks=2, accumulation=2, steps=2)
    places = [(1, "gloo"), (2, "shm"), (3, "gloo")]
    places = places[2:] if knob[0].startswith("stage3") else share(places, ZERO_KNOBS.index(knob), 2, every)
    hold_all("tied", recipe, [Setting(stage=s, transport=t, zero=(knob,)) for s, t in places])


SCALES: list[tuple[Knob, ...]] = [
    (("prescale_gradients", True),),
    (("gradient_predivide_factor", 4.0),),
    (("communication_data_type", "fp32"),),
]


@pytest.mark.parametrize("scale", SCALES, ids=lambda scale: "+".join(f"{k}={v}" for k, v in scale))
@in_shares
def test_predivide_and_postdivide_factors(scale: tuple[Knob, ...], transport: str, every: bool) -> None:
    recipe = Recipe(ranks=3, accumulation=2, steps=2)
    stages = share(range(4), SCALES.index(scale), 2, every)
    hold_all("mlp", recipe, [Setting(stage=s, transport=transport, config=scale) for s in stages])


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_can_be_summed_over_ranks(ranks: int, transport: str) -> None:
    config = (("gradient_allreduce_op", "sum"),)
    recipe = Recipe(ranks=ranks, accumulation=2, steps=2, summed=True, clipping=0.0)
    hold_all("tied", recipe, [Setting(stage=s, transport=transport, config=config) for s in range(4)])
    for scale in (("prescale_gradients", True), ("gradient_predivide_factor", 4.0)):
        hold_all("tied", recipe, [Setting(stage=s, transport=transport, config=(*config, scale)) for s in (0, 2)])
    wire = (*config, ("communication_data_type", "bf16"))
    settings = [Setting(stage=s, transport=transport, config=wire) for s in (0, 3)]
    hold_all("mlp", Recipe(ranks=ranks, steps=2, summed=True, clipping=0.5), settings, exact=False)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gradients_can_be_reduced_in_16_bits(dtype: str, transport: str) -> None:
    config = (("communication_data_type", dtype),)
    settings = [Setting(stage=s, transport=transport, config=config) for s in range(4)]
    hold_all("mlp", Recipe(ranks=2, steps=2), settings, exact=False)


@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
def test_gradients_can_be_accumulated_in_either_dtype(grad_dtype: str, transport: str) -> None:
    recipe = Recipe(ranks=2, accumulation=2, steps=2, precision="bf16")
    config = (("data_types", {"grad_accum_dtype": grad_dtype}),)
    hold_all("mlp", recipe, [Setting(stage=s, transport=transport, config=config) for s in range(4)])


SHARDINGS: list[tuple[int, Knob]] = [
    (3, ("zero_hpz_partition_size", 2)),
    (1, ("mics_shard_size", 2)),
    (2, ("mics_shard_size", 2)),
    (3, ("mics_shard_size", 2)),
    (3, ("mics_shard_size", 1)),
    (3, ("mics_shard_size", 4)),
]


@pytest.mark.parametrize(
    ("accumulation", "precision", "transport"),
    [
        (2, "fp32", "gloo"),
        pytest.param(1, "fp32", "shm", marks=pytest.mark.slow),  # slow: test_composition combines these too
        pytest.param(1, "bf16", "gloo", marks=pytest.mark.slow),
        pytest.param(3, "bf16", "shm", marks=pytest.mark.slow),
    ],
)
@in_shares
def test_sharding_over_fewer_ranks(accumulation: int, precision: str, transport: str, every: bool) -> None:
    """hpZ gathers again in backward, from a smaller group. MiCS shards within a group, and replicates across groups."""
    recipe = Recipe(ranks=4, accumulation=accumulation, precision=precision, steps=2)
    # MiCS over one rank and over all ranks runs only with `every`
    shardings = SHARDINGS if every else SHARDINGS[:4]
    settings = [Setting(stage=stage, transport=transport, zero=(knob,)) for stage, knob in shardings]
    hold_all("cross_attention", recipe, settings)


def start_only(config: dict[str, Any]) -> None:
    start(specimen("mlp"), config).destroy()


def test_indivisible_shard_size_is_refused() -> None:
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
        assert all(parameter.grad is None for parameter in engine.module.parameters())
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_unused_parameters_are_named_if_not_ignored(stage: int) -> None:
    for text in run_ranks(unused_is_an_error, 2, stage):
        assert "forgotten" in text or "blocks.1" in text


@pytest.mark.parametrize("ranks", [1, 2])
def test_sparse_embedding_gradients_are_reduced_like_dense_ones(ranks: int) -> None:
    recipe = Recipe(ranks=ranks, accumulation=2, steps=2)
    zero = (("contiguous_gradients", False),)
    settings = [Setting(stage=stage, config=(("sparse_gradients", True),)) for stage in range(4)]
    hold_all("sparse_lookups", recipe, [*settings, Setting(stage=2, zero=zero), Setting(stage=3, zero=zero)])


class TwoResults(nn.Module):
    """Linear layer that returns its output and the output's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.linear(x)
        return out, out.mean()


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TwoResults() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means = []
        for layer in self.layers:
            x, mean = layer(x)
            means.append(mean)
        return x.square().sum() + sum(means)


def uses_in_a_step() -> list[str]:
    """Return the unit of each use that the prefetcher records in a step, by the layer's number."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "blocks": ["TwoResults"]}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
    engine: Any = windlass.initialize(model=Chain(), config=config)[0]
    uses: list[str] = []
    record = Prefetcher.record_use

    def observe(self: Prefetcher, unit: Unit) -> None:
        uses.append(unit.names[0].split(".")[1])
        record(self, unit)

    with patch.object(Prefetcher, "record_use", observe):
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()
    engine.destroy()
    return uses


def test_a_block_with_several_outputs_has_one_use_in_a_backward() -> None:
    assert run_ranks(uses_in_a_step, 2) == [["0", "1", "2", "2", "1", "0"]] * 2
