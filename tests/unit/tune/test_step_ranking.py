"""Laws of the predicted order: recomputation and smaller micro-batches are slower."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.parallel.model_shape import ModelShape
from windlass.tune.memory_forecast import ForecastResult
from windlass.tune.search_space import CHECKPOINTING, STAGE, Candidate, SearchLimits, build_space
from windlass.tune.step_ranking import StepRanking, cluster_of_facts, shape_of_facts

RAW: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "activation_checkpointing": {"enabled": "auto"},
    "zero_optimization": {"stage": [1, 3]},
}
OTHER_MODEL = ForecastResult(parameters=12 * 64 * 64 * 3, tokens=32, blocks=3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_recomputation_and_small_micro_batches_are_predicted_to_be_slower(device: str) -> None:
    space = build_space(RAW, 2, SearchLimits())
    facts = ForecastResult(
        parameters=10**6, tokens=64, device=device, device_name="NVIDIA H200" if device == "cuda" else ""
    )
    ranking = StepRanking(space.config_of, 2, facts)
    seconds = {one: ranking.seconds(one) or 0.0 for one in space.candidates()}
    assert all(seconds.values()) and not ranking.problem

    def changed(one: Candidate, key: str, value: Any) -> Candidate:
        return next(c for c in seconds if c == space.complete({**one.overrides, key: value}))

    for one, predicted in seconds.items():
        if not one.get(CHECKPOINTING):
            assert predicted < seconds[changed(one, CHECKPOINTING, True)]
        if one.get("train_micro_batch_size_per_gpu") == 4 and one.get(STAGE) == 3:
            assert predicted < seconds[changed(one, "train_micro_batch_size_per_gpu", 1)]


def test_values_that_the_program_fills_in_are_left_out() -> None:
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    raw = {**RAW, "optimizer": {"type": "AdamW", "params": params}}
    raw["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    space = build_space(raw, 2, SearchLimits())
    ranking = StepRanking(space.config_of, 2, OTHER_MODEL)
    assert ranking.seconds(space.candidates()[0]) and not ranking.problem


def test_other_models_are_simulated_as_a_decoder_of_as_many_parameters() -> None:
    shape = shape_of_facts(OTHER_MODEL)
    assert (shape.hidden, shape.layers) == (64, 3)
    assert shape.numel == pytest.approx(OTHER_MODEL.parameters, rel=0.02)
    given = ModelShape(64, 2, 4, 100)
    assert shape_of_facts(ForecastResult(shape=vars(given))) == given


def test_one_host_has_all_ranks_and_the_known_gpu() -> None:
    facts = ForecastResult(device="cuda", device_name="NVIDIA A100-SXM4-80GB")
    assert cluster_of_facts(facts, 4).device.name == "a100" and cluster_of_facts(facts, 4).devices == 4
    other = ForecastResult(device="cuda", device_name="NVIDIA RTX A1000")
    assert cluster_of_facts(other, 1).device.name == "h100", "unknown GPUs count as an H100"
    assert cluster_of_facts(ForecastResult(), 3).device.name == "cpu"


def test_checkpointing_that_is_not_searched_counts_too() -> None:
    facts = ForecastResult(parameters=10**6, tokens=64)
    seconds = []
    for enabled in (False, True):
        space = build_space({**RAW, "activation_checkpointing": {"enabled": enabled}}, 2, SearchLimits())
        assert not any(dimension.key == CHECKPOINTING for dimension in space.dimensions)
        seconds.append(StepRanking(space.config_of, 2, facts).seconds(space.candidates()[0]) or 0.0)
    assert 0 < seconds[0] < seconds[1]


def test_a_configuration_that_cannot_be_simulated_has_no_prediction() -> None:
    space = build_space({**RAW, "offload": "auto"}, 2, SearchLimits())
    ranking = StepRanking(space.config_of, 2, OTHER_MODEL)
    assert ranking.seconds(space.candidates()[0]) is None and "offload" in ranking.problem
