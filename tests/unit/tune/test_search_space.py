"""Tests of the search space: which keys are searched, which configurations it has, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.base.errors import ConfigError
from windlass.config import load_config
from windlass.config.batch_sizes import ACCUMULATION, MICRO, TRAIN
from windlass.config.config_overrides import override_keys, value_at_path
from windlass.tune.search_space import (
    CHECKPOINTING,
    PARAMETERS_TIER,
    REDUCE_BUCKET,
    REUSE,
    STAGE,
    STATES_PATH,
    STATES_RATIO,
    STATES_TIER,
    Candidate,
    SearchLimits,
    build_space,
)

OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3}}


def config(**keys: Any) -> dict[str, Any]:
    return {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "optimizer": OPTIMIZER, **keys}


@pytest.mark.parametrize(
    ("zero", "changes", "expected"),
    [
        (True, {STAGE: 2}, {"stage": 2}),
        (
            {"cpu_offload": True},
            {"zero_optimization.offload_optimizer.ratio": 0.5},
            {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        ),
        ({"max_reuse_distance": 4}, {REUSE: 0}, {"stage3_max_reuse_distance": 0}),
        ({"offload_param": None}, {PARAMETERS_TIER: "cpu"}, {"offload_param": {"device": "cpu"}}),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, {STAGE: None}, {"offload_param": {"device": "cpu"}}),
        ({"stage": 3}, {PARAMETERS_TIER: None}, {"stage": 3}),
    ],
)
def test_override_replaces_every_spelling(zero: Any, changes: dict[str, Any], expected: Any) -> None:
    raw = {"zero_optimization": zero}
    before = repr(raw)
    assert override_keys(raw, changes) == {"zero_optimization": expected}
    assert repr(raw) == before
    for key, value in changes.items():
        assert value_at_path(override_keys(raw, changes), key) == value


def test_auto_keys_and_lists_are_searched_and_the_global_batch_is_kept() -> None:
    raw = config(
        train_micro_batch_size_per_gpu="auto",
        gradient_accumulation_steps="auto",
        zero_optimization={"stage": [1, 3], "max_reuse_distance": "auto"},
    )
    space = build_space(raw, 2, SearchLimits())
    assert {one.key: one.choices for one in space.dimensions} == {
        STAGE: (1, 3),
        MICRO: (1, 2, 4, 8),
        REUSE: (0, 1_000_000_000),
    }
    found = space.candidates()
    assert len(found) == 4 + 8, "stage 1 has no reuse distance"
    for candidate in found:
        sizes = load_config(space.config_of(candidate)).resolve_batch(2, "")
        assert (sizes.train, sizes.micro) == (16, candidate.get(MICRO))
        assert sizes.accumulation == candidate.get(ACCUMULATION)
    assert len({candidate.name for candidate in found}) == len(found)


def test_a_plain_configuration_searches_the_usual_keys() -> None:
    space = build_space(config(), 2, SearchLimits(has_device_memory=True, micro_count=2))
    keys = [one.key for one in space.dimensions]
    assert {STAGE, MICRO, CHECKPOINTING, STATES_TIER, STATES_RATIO, PARAMETERS_TIER, REUSE} <= set(keys)
    for candidate in space.candidates():
        stage, states = candidate.get(STAGE), candidate.get(STATES_TIER)
        assert candidate.get(STATES_RATIO) is None or states == "cpu"
        assert candidate.get(PARAMETERS_TIER) is None or stage == 3
        load_config(space.config_of(candidate)).ensure_supported()
    alone = build_space(config(), 1, SearchLimits())
    assert [one.key for one in alone.dimensions] == [STAGE, MICRO, CHECKPOINTING]


def test_compilation_is_searched_if_asked_for() -> None:
    space = build_space(config(compile={"enabled": "auto"}, train_micro_batch_size_per_gpu=[2, 4]), 1, SearchLimits())
    found = {
        candidate.name: load_config(space.config_of(candidate)).compile.enabled for candidate in space.candidates()
    }
    assert sum(found.values()) == 2 == len(found) - 2
    assert all(compiles == ("compile" in name) for name, compiles in found.items())


def test_a_range_of_the_global_batch() -> None:
    space = build_space(config(zero_optimization={"stage": [0, 1]}), 2, SearchLimits(train_min=8, train_max=32))
    assert {candidate.get(TRAIN) for candidate in space.candidates()} == {8, 16, 32}


def test_axes_keep_the_global_batch_that_micro_batch_and_accumulation_give() -> None:
    raw = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "optimizer": OPTIMIZER}
    space = build_space(raw, 4, SearchLimits(choices={"parallel.tp": (1, 2)}))
    assert {(c.get("parallel.tp"), c.get(ACCUMULATION, 2)) for c in space.candidates()} == {(1, 2), (2, 4)}


def test_without_a_batch_the_micro_batch_is_free() -> None:
    raw = {"train_micro_batch_size_per_gpu": "auto", "optimizer": OPTIMIZER}
    space = build_space(raw, 2, SearchLimits(micro_max=8))
    assert [(c.get(MICRO), c.get(ACCUMULATION), c.get(TRAIN)) for c in space.candidates()] == [
        (1, 1, 2),
        (2, 1, 4),
        (4, 1, 8),
        (8, 1, 16),
    ]


def test_stated_numbers_are_searched_from_small_to_large() -> None:
    raw = config(zero_optimization={"stage": [3, 0, 2, 1]}, train_micro_batch_size_per_gpu=[8, 1, 4, 2])
    space = build_space(raw, 1, SearchLimits(choices={"zero_optimization.overlap_comm": (True, False)}))
    choices = {one.key: one.choices for one in space.dimensions}
    assert choices == {STAGE: (0, 1, 2, 3), MICRO: (1, 2, 4, 8), "zero_optimization.overlap_comm": (False, True)}
    start = space.start()
    assert start is not None and (start.get(STAGE), start.get(MICRO)) == (1, 4)
    assert {one.get(MICRO) for one in space.neighbours(start) if one.get(STAGE) == 1} == {2, 4, 8}
    assert space.first_values == {STAGE: 3, MICRO: 8}, "a script that reads the file gets the first value"


def test_nvme_takes_part_with_a_path() -> None:
    raw = config(zero_optimization={"stage": 3, "offload_optimizer": {"device": "auto"}})
    space = build_space(raw, 1, SearchLimits(nvme_path="/fast"))
    found = {c.get(STATES_TIER): space.config_of(c) for c in space.candidates()}
    assert set(found) == {"none", "nvme"}
    assert found["nvme"]["zero_optimization"]["offload_optimizer"] == {"device": "nvme", "nvme_path": "/fast"}


def test_several_nvme_folders_stay_a_list() -> None:
    section = {"device": "auto", "nvme_path": ["/fast", "/faster"]}
    space = build_space(config(zero_optimization={"stage": 3, "offload_optimizer": section}), 1, SearchLimits())
    found = {c.get(STATES_TIER): c for c in space.candidates()}
    assert set(found) == {"none", "nvme"}
    chosen = space.config_of(found["nvme"])["zero_optimization"]["offload_optimizer"]
    assert chosen == {"device": "nvme", "nvme_path": ["/fast", "/faster"]}
    assert space.overrides_of(found["nvme"])[STATES_PATH] == ["/fast", "/faster"]


def test_folders_of_nvme_are_no_choices_beside_the_tier() -> None:
    limits = SearchLimits(choices={STATES_TIER: ("none", "nvme"), STATES_PATH: ("/fast", "/faster")})
    with pytest.raises(ConfigError, match=r"nvme_path cannot be searched \(/fast, /faster\) together with .*device"):
        build_space(config(zero_optimization={"stage": 3}), 1, limits)


def test_folders_of_nvme_are_choices_where_the_tier_is_fixed() -> None:
    section = {"device": "nvme", "nvme_path": "/fast"}
    limits = SearchLimits(choices={STATES_PATH: ("/fast", "/faster")})
    space = build_space(config(zero_optimization={"stage": 3, "offload_optimizer": section}), 1, limits)
    assert {one.get(STATES_PATH) for one in space.candidates()} == {"/fast", "/faster"}


def test_neighbours_change_one_key_and_ordered_ones_to_the_next_value() -> None:
    space = build_space(config(zero_optimization={"stage": [0, 1, 3]}), 2, SearchLimits(choices={MICRO: (1, 2, 4, 8)}))
    found = next(space.neighbours(one) for one in space.candidates() if one.name == "z1_mbs2_gas4")
    assert [(one.get(STAGE), one.get(MICRO)) for one in found] == [(0, 2), (3, 2), (1, 1), (1, 4)]


def test_the_first_trial_has_the_users_values_and_middle_ones_where_there_are_none() -> None:
    choices = {MICRO: (1, 2, 4, 8)}
    start = build_space(config(zero_optimization={"stage": [0, 1, 2, 3]}), 2, SearchLimits(choices=choices)).start()
    assert start is not None and (start.get(STAGE), start.get(MICRO)) == (1, 4)
    given = config(zero_optimization={"stage": 3}, train_micro_batch_size_per_gpu=2)
    start = build_space(given, 2, SearchLimits(choices={STAGE: (1, 3), MICRO: (2, 4)})).start()
    assert start is not None and (start.get(STAGE), start.get(MICRO)) == (3, 2)


def test_lists_in_the_users_file_are_replaced_where_their_key_has_no_effect() -> None:
    """A program may read the user's file itself: the overrides of a trial must replace every list in it."""
    zero = {
        "stage": [0, 3],
        "stage3_max_reuse_distance": [0, 1000],
        "stage3_gather_16bit_weights_on_model_save": [True],
    }
    raw = config(zero_optimization=zero, parallel={"tp": [1, 2]})
    space = build_space(raw, 2, SearchLimits())
    found = space.candidates()
    assert [(one.get(STAGE), one.get(REUSE), one.get("parallel.tp")) for one in found] == [
        *((0, None, tp) for tp in (1, 2)),
        *((3, reuse, tp) for reuse in (0, 1000) for tp in (1, 2)),
    ]
    for candidate in found:
        own = load_config(override_keys(raw, space.overrides_of(candidate)))
        assert own == load_config(space.config_of(candidate))


def test_a_list_that_states_no_choices_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r'parallel.tp: \["x", 2\] does not fit'):
        build_space(config(zero_optimization={"stage": [0, 3]}, parallel={"tp": ["x", 2]}), 2, SearchLimits())


def test_higher_stage_or_smaller_micro_batch_needs_no_more_memory() -> None:
    space = build_space(config(zero_optimization={"stage": [0, 3]}), 2, SearchLimits(choices={MICRO: (2, 4)}))
    by_name = {candidate.name: candidate for candidate in space.candidates()}
    pairs = {
        (a, b)
        for a, first in by_name.items()
        for b, other in by_name.items()
        if space.needs_no_less_memory(first, other)
    }
    names = ("z0_mbs4_gas2", "z0_mbs2_gas4", "z3_mbs4_gas2", "z3_mbs2_gas4")
    assert pairs == {(name, name) for name in names} | {
        *((names[0], other) for other in names[1:]),
        (names[1], names[3]),
        (names[2], names[3]),
    }


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        ("bf16.enabled", (False, True), set()),
        ("data_types.grad_accum_dtype", ("fp32", "bf16"), set()),
        (STATES_TIER, ("none", "cpu"), set()),
        (REDUCE_BUCKET, (1000, 2000), {(2000, 1000)}),
        (REUSE, (0, 1000), {(1000, 0)}),
        (CHECKPOINTING, (False, True), {(False, True)}),
    ],
)
def test_one_value_needs_no_less_memory_than_another_only_if_its_effect_is_known(
    key: str, values: tuple[Any, ...], expected: set[tuple[Any, Any]]
) -> None:
    space = build_space(config(zero_optimization={"stage": 3}), 2, SearchLimits(choices={key: values}))
    found = space.candidates()
    assert {one.get(key) for one in found} == set(values)
    assert {
        (one.get(key), other.get(key))
        for one in found
        for other in found
        if one != other and space.needs_no_less_memory(one, other)
    } == expected


def test_stage_2_needs_no_less_memory_than_stage_3_with_reuse_distance_0() -> None:
    raw = config(zero_optimization={"stage": [2, 3], "stage3_max_reuse_distance": 0})
    second, third = build_space(raw, 2, SearchLimits()).candidates()
    space = build_space(raw, 2, SearchLimits())
    assert space.needs_no_less_memory(second, third) and not space.needs_no_less_memory(third, second)


def test_a_tier_without_effect_at_a_stage_is_none() -> None:
    limits = SearchLimits(choices={PARAMETERS_TIER: ("none", "cpu")})
    space = build_space(config(zero_optimization={"stage": [2, 3]}), 2, limits)
    second, third, offloaded = space.candidates()
    assert [one.get(PARAMETERS_TIER) for one in (second, third, offloaded)] == [None, "none", "cpu"]
    assert space.needs_no_less_memory(second, third) and not space.needs_no_less_memory(second, offloaded)


def test_memory_is_compared_with_auto_at_keys_without_effect() -> None:
    raw = config(zero_optimization={"stage": [0, 3], "reduce_bucket_size": "auto"})
    space = build_space(raw, 1, SearchLimits())
    whole, sharded = space.candidates()
    assert whole.get(REDUCE_BUCKET) is None and value_at_path(space.config_of(whole), REDUCE_BUCKET) == "auto"
    assert space.needs_no_less_memory(whole, sharded) and not space.needs_no_less_memory(sharded, whole)


@pytest.mark.parametrize(
    ("raw", "choices", "expected"),
    [
        (config(gradient_accumulation_steps=2), {TRAIN: (8, 16)}, [(8, 4, 1), (16, 4, 2)]),
        ({"optimizer": OPTIMIZER}, {TRAIN: (8, 16)}, [(8, 4, 1), (16, 8, 1)]),
        (config(train_micro_batch_size_per_gpu=[2, 4], gradient_accumulation_steps=2), {}, [(16, 2, 4), (16, 4, 2)]),
        (config(train_batch_size=[8, 12, 16]), {}, [(8, 4, 1), (16, 4, 2)]),
    ],
)
def test_searched_batch_sizes_fit_together(
    raw: dict[str, Any], choices: dict[str, Any], expected: list[tuple[int, int, int]]
) -> None:
    space = build_space(raw, 2, SearchLimits(choices=choices))
    found = space.candidates()
    sizes = [load_config(space.config_of(one)).resolve_batch(2, "") for one in found]
    assert [(one.train, one.micro, one.accumulation) for one in sizes] == expected
    assert len({one.name for one in found}) == len(found)


def test_ranks_of_a_searched_axis_load_the_same_samples() -> None:
    raw = config(train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto")
    space = build_space(raw, 2, SearchLimits(choices={"tensor_parallel.autotp_size": (1, 2), MICRO: (8, 16)}))
    found = space.candidates()
    assert {(one.get("tensor_parallel.autotp_size"), one.get(MICRO), one.get(ACCUMULATION)) for one in found} == {
        (1, 8, 1),
        (2, 8, 2),
        (2, 16, 1),
    }
    for one in found:
        assert load_config(space.config_of(one)).resolve_batch(2, "").train == 16


@pytest.mark.parametrize("sizes", [{MICRO: "auto"}, {TRAIN: 16, MICRO: "auto"}, {}, {MICRO: 2}])
def test_micro_batches_of_a_pipeline_are_accumulation_steps(sizes: dict[str, Any]) -> None:
    pipeline = {"parallel": {"pp": 2}, "pipeline": {"micro_batches": 4, "schedule": "gpipe"}}
    plain = build_space({"parallel": {"pp": 2}, ACCUMULATION: 4, **sizes}, 4, SearchLimits())
    space = build_space({**pipeline, **sizes}, 4, SearchLimits())
    assert [one.name for one in space.candidates()] == [one.name for one in plain.candidates()]
    for candidate in space.candidates():
        own = load_config(override_keys({**pipeline, **sizes}, space.overrides_of(candidate)))  # the program's own file
        found = load_config(space.config_of(candidate))
        assert own.resolve_batch(4) == found.resolve_batch(4) and own.pipeline.schedule == "gpipe"
        assert TRAIN in sizes or sizes.get(MICRO) == 2 or found.resolve_batch(4).accumulation == 4
    with pytest.raises(ConfigError, match="pipeline.micro_batches: true does not fit"):
        build_space({**pipeline, "pipeline": {"micro_batches": True}}, 4, SearchLimits())


@pytest.mark.parametrize(
    ("raw", "limits", "message"),
    [
        (config(), {"choices": {ACCUMULATION: (1, 2)}}, "gradient_accumulation_steps cannot be searched .1, 2.*search"),
        (config(gradient_accumulation_steps=[1, 2]), {}, "gradient_accumulation_steps cannot be searched"),
        (config(), {"choices": {MICRO: (0, 1)}}, "train_micro_batch_size_per_gpu: 0 is not a batch size"),
        (config(), {"choices": {MICRO: (1, "x")}}, "train_micro_batch_size_per_gpu: 'x' is not a batch size"),
        (config(train_batch_size=[16, 1.5]), {}, "train_batch_size: 1.5 is not a batch size"),
        (config(), {"choices": {STAGE: (1, None)}}, "zero_optimization.stage: None is not a choice"),
        (config(zero_optimization={"stage": [1, [2]]}), {}, r"zero_optimization.stage: \[2\] is not a choice"),
        (config(zero_optimization={"stage": [2]}), {}, "nothing to search"),
        (
            config(train_micro_batch_size_per_gpu="auto"),
            {"micro_min": 9},
            "no micro-batch from 9 to 1024 divides the 8",
        ),
        (config(zero_optimization={"stage": [7, 8]}), {}, "zero_optimization.stage: 7 does not fit"),
        (config(), {"train_min": 1, "train_max": 1}, "no global batch from 1 to 1 is a multiple of 2"),
    ],
)
def test_refusals_name_the_fix(raw: dict[str, Any], limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_space(raw, 2, SearchLimits(**limits)).candidates()


def test_candidates_that_differ_have_different_names() -> None:
    """Names differ, because the name of a candidate identifies its folder, its prediction and its refusal."""
    choices = {
        "bf16.enabled": (False, True),
        "torch_autocast.enabled": (False, True),
        "zero_optimization.reduce_bucket_size": (1_048_576, 1_049_000),
    }
    space = build_space(config(), 2, SearchLimits(choices=choices))
    found = space.candidates()
    names = {candidate.name for candidate in found}
    assert len(names) == len(found)
    for switch in choices:
        if switch.endswith("enabled"):
            assert {candidate.get(switch) for candidate in found} == {False, True}, "one was refused for another"


def test_every_candidate_has_a_name_that_a_folder_can_have() -> None:
    space = build_space(config(), 1, SearchLimits(choices={"bf16.enabled": (False, True)}))
    assert all(one.name for one in space.candidates())
    long = {f"k{number}.{'x' * 40}": (1, 2) for number in range(6)}
    names = {Candidate(tuple((key, values[bit]) for key, values in long.items())).name for bit in (0, 1)}
    assert len(names) == 2 and all(len(name) <= 200 for name in names)
