"""Tests of the batch sizes: all 27 combinations, no rounding, and errors that show every number and its origin."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.base.errors import ConfigError
from windlass.config import load_config
from windlass.config.batch_sizes import ACCUMULATION, KEYS, MICRO, TRAIN

STATES = ("present", "absent", "auto")
sizes = st.integers(1, 64)


def configured(states: tuple[str, ...], values: tuple[int, ...]) -> dict[str, Any]:
    return {
        key: "auto" if state == "auto" else value
        for key, state, value in zip(KEYS, states, values, strict=True)
        if state != "absent"
    }


@pytest.mark.parametrize("states", list(product(STATES, repeat=3)))
def test_every_combination_resolves_or_names_the_missing_key(states: tuple[str, ...]) -> None:
    world, micro, steps = 4, 3, 2
    given_ = dict(zip(KEYS, (state == "present" for state in states), strict=True))
    train = micro * steps * world if given_[MICRO] or given_[ACCUMULATION] else 12
    config = load_config(configured(states, (train, micro, steps)))
    if not given_[TRAIN] and not given_[MICRO]:
        with pytest.raises(ConfigError, match="neither train_batch_size nor train_micro_batch_size_per_gpu"):
            config.resolve_batch(world)
        return
    batch = config.resolve_batch(world)
    assert batch.train == batch.micro * batch.accumulation * world
    if given_[TRAIN]:
        assert batch.train == train
    if given_[MICRO]:
        assert batch.micro == micro
    if given_[ACCUMULATION]:
        assert batch.accumulation == steps
    if sum(given_.values()) == 1:
        assert batch.accumulation == 1


@given(sizes, sizes, sizes, st.sampled_from([s for s in product((True, False), repeat=3) if s[0] or s[1]]))
def test_omitted_sizes_are_derived(micro: int, steps: int, world: int, kept: tuple[bool, ...]) -> None:
    only_one = sum(kept) == 1
    steps = 1 if only_one else steps
    full = dict(zip(KEYS, (micro * steps * world, micro, steps), strict=True))
    source = {key: value for (key, value), keep in zip(full.items(), kept, strict=True) if keep}
    batch = load_config(source).resolve_batch(world)
    assert {TRAIN: batch.train, MICRO: batch.micro, ACCUMULATION: batch.accumulation} == full


@given(sizes, sizes, sizes, sizes)
def test_sizes_are_never_rounded(train: int, micro: int, steps: int, world: int) -> None:
    for source in (
        {TRAIN: train, MICRO: micro},
        {TRAIN: train, ACCUMULATION: steps},
        {TRAIN: train},
        {TRAIN: train, MICRO: micro, ACCUMULATION: steps},
    ):
        config = load_config(source)
        try:
            batch = config.resolve_batch(world)
        except ConfigError:
            parts = source.get(MICRO, 1) * source.get(ACCUMULATION, 1) * world
            assert train != parts if len(source) == 3 else train % parts
        else:
            assert batch.train == train == batch.micro * batch.accumulation * world
            assert min(batch.micro, batch.accumulation) >= 1


def test_a_failure_shows_numbers_origins_and_the_line_to_change(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{\n "train_micro_batch_size_per_gpu": 4,\n "train_batch_size": 33,\n "gradient_accumulation_steps": "auto"\n}'
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path).resolve_batch(2, "torchrun")
    text = str(caught.value)
    assert "train_batch_size 33 is not divisible by train_micro_batch_size_per_gpu 4 x world size 2 = 8" in text
    for number, origin in (("33", f"{path} line 3"), ("4", f"{path} line 2"), ("-", f'"auto" in {path} line 4')):
        assert any(line.split(maxsplit=2)[1:] == [number, origin] for line in text.splitlines()[1:4]), (number, text)
    assert "2  torchrun" in text
    assert f'change: {path} line 3: "train_batch_size": 32 or 40' in text


def test_a_derived_number_is_shown_as_derived() -> None:
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps +1 +derived \(absent\)"):
        load_config({TRAIN: 7}).resolve_batch(2)


def test_micro_batch_size_must_be_at_least_one() -> None:
    with pytest.raises(ConfigError, match='"train_batch_size": 8$'):
        load_config({TRAIN: 4}).resolve_batch(8)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many"])
@pytest.mark.parametrize("key", KEYS)
def test_sizes_are_positive_whole_numbers(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        load_config({MICRO: 1} | {key: value})


def test_a_world_of_no_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="world size 0"):
        load_config({MICRO: 1}).resolve_batch(0)


def test_ranks_along_pp_sp_and_tp_read_the_same_samples(tmp_path: Path) -> None:
    parallel = {"pp": 2, "ep": 2, "sp": 2, "tp": 2}
    batch = load_config({MICRO: 3, ACCUMULATION: 5, "parallel": parallel}).resolve_batch(32)
    assert batch.train == 3 * 5 * 4
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 33, "train_micro_batch_size_per_gpu": 4, "parallel": {"pp": 2, "ep": 2}}')
    with pytest.raises(ConfigError) as caught:
        load_config(path).resolve_batch(8, "torchrun")
    text = str(caught.value)
    assert (
        "train_batch_size 33 is not divisible by train_micro_batch_size_per_gpu 4 x data-loading ranks 4 = 16" in text
    )
    axes = "pp 2 x dp_replicate 1 x dp_shard 2 x ep 2 x sp 1 x tp 1"
    assert f"4  dp_replicate x dp_shard x ep of the world size 8 (torchrun): {axes}" in text


def test_data_loading_ranks_follow_from_the_given_axes() -> None:
    config = load_config({MICRO: 1})
    axes = config.axes(8, "torchrun", {"mpu": {"tp": 4}})
    assert config.resolve_batch(8, "torchrun", axes).train == 2


def test_micro_batches_of_a_pipeline_are_accumulated() -> None:
    assert load_config({MICRO: 2, "pipeline": {"micro_batches": 4}}).resolve_batch(3).accumulation == 4
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps +4 +config") as caught:
        load_config({TRAIN: 7, "pipeline": {"micro_batches": 4}}).resolve_batch(1)
    assert "7 is not divisible by gradient_accumulation_steps 4" in str(caught.value)
