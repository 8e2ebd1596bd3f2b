"""Tests of the feature matrix: it is symmetric, complete and consistent with the schema's refusals, and its cases cover
every pair."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from windlass.config import feature_matrix, load_config
from windlass.config.feature_matrix import (
    FEATURES,
    INCOMPATIBLE_PAIRS,
    all_pairs,
    check_pair,
    describe_features,
    supported_pairs,
    uncovered_pairs,
    unsupported_pairs,
)

DISK = {"device": "nvme", "nvme_path": "x"}
UNBUILT: dict[tuple[str, str], dict[str, Any]] = {}
BUILT: dict[tuple[str, str], dict[str, Any]] = {
    ("checkpointing", "host"): {"activation_checkpointing": {"cpu_checkpointing": True}},
    ("checkpointing", "nvme"): {"activation_checkpointing": {"nvme_path": "x"}},
    ("param_tier", "host"): {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    ("param_tier", "nvme"): {"zero_optimization": {"stage": 3, "offload_param": DISK}},
    ("state_tier", "host"): {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    ("state_tier", "nvme"): {
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "x"}}
    },
    **{("stage", str(stage)): {"zero_optimization": {"stage": stage}} for stage in range(4)},
    ("optimizer", "onebit"): {"optimizer": {"type": "OneBitAdam"}},
    ("optimizer", "elementwise"): {"optimizer": {"type": "sgd"}},
    ("optimizer", "whole_parameter"): {"optimizer": {"type": "lamb"}},
    ("precision", "fp32"): {},
    ("precision", "bf16"): {"bf16": {"enabled": True}},
    ("precision", "fp16"): {"fp16": {"enabled": True}},
    ("precision", "autocast"): {"torch_autocast": {"enabled": True}},
    ("accumulation", "one"): {"gradient_accumulation_steps": 1},
    ("accumulation", "many"): {"gradient_accumulation_steps": 2},
    ("parallel", "data"): {"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}},
    ("parallel", "mics"): {"zero_optimization": {"stage": 1, "mics_shard_size": 2}},
    ("parallel", "hpz"): {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
    **{(axis, "one"): {"parallel": {axis: 1}} for axis in ("pp", "tp", "sp", "ep")},
    **{(axis, "many"): {"parallel": {axis: 2}} for axis in ("pp", "tp", "sp", "ep")},
    ("transport", "shm"): {},
    ("transport", "gloo"): {"comm": {"transport": "gloo"}},
    ("transport", "nccl"): {"comm": {"transport": "nccl"}},
    ("overlap", "on"): {"zero_optimization": {"stage": 2}},
    ("update", "at once"): {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    ("update", "delayed"): {
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "delayed_update": True}}
    },
    ("overlap", "off"): {"zero_optimization": {"stage": 3, "overlap_comm": False}},
}


@pytest.mark.parametrize(("choice", "source"), [*UNBUILT.items(), *BUILT.items()])
def test_a_configuration_is_described_by_its_choices(choice: tuple[str, str], source: dict[str, Any]) -> None:
    axis, value = choice
    config = load_config(source)
    assert describe_features(config)[axis] == value
    assert bool(config.refusals()) == (choice in UNBUILT)


def test_micro_batches_of_a_pipeline_count_as_accumulation() -> None:
    config = load_config({"parallel": {"pp": 2}, "pipeline": {"micro_batches": 4}})
    assert describe_features(config)["accumulation"] == "many"


def test_the_schema_refuses_what_the_matrix_does_not_offer() -> None:
    assert {(a, v) for a, values in FEATURES.items() for v, value in values.items() if value.not_built_reason} == set(
        UNBUILT
    )


def test_every_pair_has_one_status_in_both_orders() -> None:
    sizes = [len(values) for values in FEATURES.values()]
    assert len(all_pairs()) == sum(a * b for a, b in combinations(sizes, 2))
    for pair in all_pairs():
        turned = check_pair(pair.second, pair.first)
        assert (turned.is_supported, turned.reason) == (pair.is_supported, pair.reason)
        assert pair.is_supported == (not pair.reason)


def test_exceptions_name_choices_that_exist() -> None:
    for pair in INCOMPATIBLE_PAIRS:
        assert len({axis for axis, _ in pair}) == 2
        assert all(value in FEATURES[axis] for axis, value in pair)


def test_all_supported_cases_cover_every_pair() -> None:
    offered = {
        axis: [name for name, value in values.items() if not value.not_built_reason]
        for axis, values in FEATURES.items()
    }
    first = {axis: names[0] for axis, names in offered.items()}
    cases = [{**first, x: a, y: b} for x, y in combinations(offered, 2) for a in offered[x] for b in offered[y]]
    needs = {"gpu", "transformer"}
    assert uncovered_pairs(cases, available=needs) == []
    assert all(pair.requirements == set() for pair in supported_pairs())
    assert {pair.requirements for pair in supported_pairs({"gpu"})} == {frozenset(), frozenset({"gpu"})}
    assert {pair.requirements for pair in supported_pairs(needs)} >= {frozenset({"transformer"}), frozenset(needs)}


def test_one_case_covers_exactly_its_pairs() -> None:
    case = describe_features(load_config({"zero_optimization": {"stage": 1}}), adapters="frozen base", backward="plain")
    missing = uncovered_pairs([case])
    assert len(supported_pairs()) - len(missing) == len(list(combinations(case, 2)))
    assert unsupported_pairs(case) == []


def test_refused_pair_is_refused_by_the_configuration() -> None:
    config = load_config({"zero_optimization": {"stage": 2}})
    case = describe_features(config, parallel="hpz")
    assert [pair.reason for pair in unsupported_pairs(case)] == [
        INCOMPATIBLE_PAIRS[frozenset({("stage", "2"), ("parallel", "hpz")})]
    ]


@pytest.mark.parametrize(
    ("more", "key", "value"),
    [
        ({"zero_optimization": {"stage": 2, "mics_shard_size": 2}}, "zero_optimization.mics_shard_size", 2),
        ({"zero_optimization": {"stage": 2}, "parallel": {"dp_replicate": 4}}, "parallel.dp_replicate", 4),
        ({"zero_optimization": {"stage": 1}, "sequence_parallel_size": 3}, "parallel.sp", 3),
        ({"parallel": {"ep": 2}}, "parallel.ep", 2),
        (
            {
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "cpu", "delayed_update": True},
                }
            },
            "zero_optimization.offload_optimizer.delayed_update",
            True,
        ),
    ],
)
def test_a_refused_pair_names_keys_and_values_of_the_configuration(more: dict[str, Any], key: str, value: Any) -> None:
    refusals = load_config({"optimizer": {"type": "OneBitAdam"}, **more}).refusals()
    assert [(one.path, one.value) for one in refusals] == [(f"optimizer.type with {key}", f"OneBitAdam with {value}")]


def test_a_refused_pair_of_shards_and_tiers_names_their_keys() -> None:
    section = {"stage": 3, "zero_hpz_partition_size": 2, "offload_param": {"device": "cpu"}}
    refusals = load_config({"zero_optimization": section}).refusals()
    keys = "zero_optimization.offload_param.device with zero_optimization.zero_hpz_partition_size"
    assert [(one.path, one.value) for one in refusals] == [(keys, "cpu with 2")]


def test_whole_parameter_rules_update_sharded_parameters() -> None:
    assert load_config({"optimizer": {"type": "Lamb"}, "parallel": {"tp": 2, "ep": 2}}).refusals() == []


def test_an_unknown_axis_or_value_is_an_error() -> None:
    for facts in ({"weather": "fine"}, {"adapters": "many"}):
        with pytest.raises(KeyError):
            describe_features(load_config({}), **facts)
    with pytest.raises(KeyError):
        uncovered_pairs([{"stage": "4"}])


def test_elementwise_flag_equals_the_optimizer_table() -> None:
    from windlass.optim import elementwise_optimizers, mup

    assert {cls.__name__ for cls in elementwise_optimizers._ELEMENTWISE} | {
        *mup.OPTIMIZER_NAMES
    } == feature_matrix.ELEMENTWISE_OPTIMIZERS
