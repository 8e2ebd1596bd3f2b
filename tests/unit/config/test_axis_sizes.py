"""Tests of the mesh axes that a configuration requests: every key that gives a size, on worlds that fit and do not."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.base.errors import ConfigError
from windlass.comm.mesh_shape import MeshShape
from windlass.config import Axes, load_config

small = st.integers(1, 4)


@given(small, small, small, small, small, small)
def test_data_axis_fills_the_remaining_ranks(pp: int, replicate: int, shard: int, ep: int, sp: int, tp: int) -> None:
    parallel = {"pp": pp, "dp_replicate": replicate, "ep": ep, "sp": sp, "tp": tp}
    world = pp * replicate * shard * ep * sp * tp
    axes = load_config({"parallel": parallel}).axes(world)
    assert axes == Axes(dp_shard=shard, **parallel)
    grid = MeshShape(**axes.sizes)
    loaders = replicate * shard * ep
    assert (grid.world, grid.data_loading_size, grid.data) == (world, loaders, loaders * sp)
    assert (axes.world_size, axes.data_loading_size) == (world, loaders)
    assert str(axes) == str(grid)


@given(small, small, small, small, st.integers(1, 64))
def test_world_size_error_names_a_size_that_fits(pp: int, ep: int, sp: int, tp: int, world: int) -> None:
    config = load_config({"parallel": {"pp": pp, "ep": ep, "sp": sp, "tp": tp}})
    fixed = pp * ep * sp * tp
    if world % fixed == 0:
        assert config.axes(world).world_size == world
        return
    with pytest.raises(ConfigError) as caught:
        config.axes(world)
    counts = str(caught.value).split("start ")[1].split(" ranks")[0]
    for count in counts.split(" or "):
        assert config.axes(int(count)).world_size == int(count)


def test_axis_error_lists_all_sizes_and_what_would_fit() -> None:
    config = load_config({"parallel": {"pp": 2, "tp": 4, "dp_replicate": 2}})
    with pytest.raises(ConfigError) as caught:
        config.axes(24, "torchrun")
    assert str(caught.value) == (
        "the axes do not multiply to the world: pp 2 x dp_replicate 2 x ep 1 x sp 1 x tp 4 = 16 ranks do not divide "
        "the world size 24 (torchrun), so dp_shard would not be a whole number; possible sizes: start 16 or 32 ranks; "
        "pp 1 or 3 with the others as they are; tp 3 or 6 with the others as they are; "
        "dp_replicate 1 or 3 with the others as they are"
    )
    for parallel in ({"pp": 3, "tp": 4, "dp_replicate": 2}, {"pp": 2, "tp": 6, "dp_replicate": 2}):
        assert load_config({"parallel": parallel}).axes(24).world_size == 24


@given(st.integers(1, 12), st.integers(1, 12))
def test_mics_shard_size_sets_the_shard_axis(shard: int, world: int) -> None:
    config = load_config({"zero_optimization": {"stage": 3, "mics_shard_size": shard}})
    if world % shard:
        with pytest.raises(ConfigError, match=f"mics_shard_size = {shard} does not divide the world size {world};"):
            config.axes(world)
    else:
        axes = config.axes(world)
        assert (axes.dp_shard, axes.dp_replicate * axes.dp_shard, axes.secondary_size) == (shard, world, None)


def test_mics_counts_ranks_along_ep_and_sp() -> None:
    source = {"zero_optimization": {"mics_shard_size": 4}, "parallel": {"ep": 2, "sp": 2, "tp": 2}}
    assert load_config(source).axes(16) == Axes(dp_replicate=2, ep=2, sp=2, tp=2)
    with pytest.raises(ConfigError, match=r"mics_shard_size = 2 is not a multiple of ep x sp = 4.* one of 4 or 8,"):
        load_config({**source, "zero_optimization": {"mics_shard_size": 2}}).axes(16)
    with pytest.raises(ConfigError, match=r"does not divide the world size 16 / \(pp 1 x tp 2\) = 8; write a divisor"):
        load_config({**source, "zero_optimization": {"mics_shard_size": 3}}).axes(16)


def test_mics_and_dp_replicate_must_agree() -> None:
    def source(replicate: int) -> dict[str, Any]:
        return {"zero_optimization": {"mics_shard_size": 4}, "parallel": {"dp_replicate": replicate}}

    assert load_config(source(2)).axes(8).dp_replicate == 2
    for replicate in (1, 4):
        with pytest.raises(ConfigError, match=rf"= 4 makes 2 groups .* parallel.dp_replicate = {replicate}"):
            load_config(source(replicate)).axes(8)


def test_hpz_sets_the_secondary_size_at_stage_three_only() -> None:
    def axes(stage: int, tp: int = 1) -> Axes:
        zero = {"stage": stage, "zero_hpz_partition_size": 2}
        return load_config({"zero_optimization": zero, "parallel": {"tp": tp}}).axes(4)

    assert axes(3) == Axes(dp_shard=4, secondary_size=2)
    assert axes(2) == Axes(dp_shard=4)
    assert axes(3, tp=2) == Axes(dp_shard=2, tp=2, secondary_size=2)
    with pytest.raises(ConfigError, match=r"zero_hpz_partition_size = 2 does not divide the world size 4 .* = 1"):
        axes(3, tp=4)


DEEPSPEED: list[tuple[dict[str, Any], Axes]] = [
    ({"tensor_parallel": {"autotp_size": 4}}, Axes(dp_shard=2, tp=4)),
    ({"tensor_parallel": {"tensor_parallel": {"tp_size": 4}}}, Axes(dp_shard=2, tp=4)),
    ({"tensor_parallel": {"autotp_size": 0}}, Axes(dp_shard=8)),
    ({"sequence_parallel_size": 2}, Axes(dp_shard=4, sp=2)),
    ({"sequence_parallel_size": 2, "data_parallel_size": 4}, Axes(dp_shard=4, sp=2)),
    ({"data_parallel_size": 3}, Axes(dp_shard=8)),  # read only together with `sequence_parallel_size`
    ({"pipeline": {"stages": 4}}, Axes(pp=4, dp_shard=2)),
    ({"pipeline": {"stages": "auto"}}, Axes(dp_shard=8)),
    ({"pipeline": {"stages": "auto"}, "parallel": {"pp": 2}}, Axes(pp=2, dp_shard=4)),
    ({"expert_parallel": {"enabled": True, "autoep_size": 4}}, Axes(dp_shard=2, ep=4)),
    ({"expert_parallel": {"autoep_size": 4}}, Axes(dp_shard=8)),
]


@pytest.mark.parametrize(("source", "wanted"), DEEPSPEED)
def test_axis_sizes_are_read_from_deepspeed_keys(source: dict[str, Any], wanted: Axes) -> None:
    config = load_config(source)
    assert config.refusals() == []
    assert config.axes(8) == wanted


def test_data_parallel_size_must_equal_the_remaining_ranks() -> None:
    config = load_config({"sequence_parallel_size": 2, "data_parallel_size": 2})
    with pytest.raises(ConfigError, match=r"data_parallel_size = 2, .* leave 4 data-loading ranks; write 4, or"):
        config.axes(8)


def test_sizes_from_other_sources_are_used_and_must_agree() -> None:
    config = load_config({"parallel": {"tp": 2}})
    assert config.axes(8, other_sizes={"mpu": {"pp": 2, "tp": 2}}) == Axes(pp=2, dp_shard=2, tp=2)
    with pytest.raises(ConfigError, match=r"parallel.tp = 2 and mpu \(tp\) = 4 are two sizes of one axis, tp"):
        config.axes(8, other_sizes={"mpu": {"tp": 4}})
    with pytest.raises(ConfigError, match=r"mpu \(pp\) = 2 and PipelineModule \(pp\) = 4 are two sizes"):
        config.axes(8, other_sizes={"mpu": {"pp": 2}, "PipelineModule": {"pp": 4}})


def test_ulysses_degree_must_fit_sp_from_any_source() -> None:
    config = load_config({"parallel": {"sp_mode": "ulysses+ring", "ulysses_degree": 1}})
    assert config.axes(4, other_sizes={"mpu": {"sp": 4}}).sp == 4
    text = load_config({"parallel": {"sp": 4, "sp_mode": "ulysses+ring", "ulysses_degree": 2}}).parallel
    assert text.ulysses_size(4) == 2
    assert load_config({"parallel": {"sp": 4, "sp_mode": "ulysses+ring"}}).parallel.ulysses_size(4) is None
    assert load_config({}).parallel.ulysses_size(4) == 4
    assert load_config({"parallel": {"sp_mode": "ring"}}).parallel.ulysses_size(4) == 1


@pytest.mark.parametrize("world", [0, -1])
def test_world_size_must_be_positive(world: int) -> None:
    with pytest.raises(ConfigError, match=f"the world size {world} is not positive"):
        load_config({}).axes(world)


def test_partition_table_merges_both_spellings() -> None:
    specs = [
        {"patterns": [r".*\.o_proj\.weight$", r".*down"], "partition_type": "row"},
        {"patterns": r".*up", "model_types": ["gpt2"]},
        {"patterns": [r".*norm", r".*down"], "partition_type": "skip"},
    ]
    own = {r"layers\.\d+\.up": "column", "head": "vocabulary"}
    names = ["layers.3.up", "layers.3.o_proj", "layers.3.down", "layers.3.upper", "layers.3.norm", "head"]

    def table(model_type: str | None = None, **more: Any) -> dict[str, str]:
        partition = {"layer_specs": specs, **more}
        config = load_config({"parallel": {"tensor_table": own}, "tensor_parallel": {"partition_config": partition}})
        assert config.refusals() == []
        lines = config.tensor_table(names, model_type)
        assert list(lines)[-2:] == list(own)  # entries of `tensor_table` come last, and the last match wins
        results = {name: [cut for line, cut in lines.items() if re.fullmatch(line, name)] for name in names}
        return {name: cuts[-1] for name, cuts in results.items() if cuts}

    expected = {
        "layers.3.up": "column",
        "layers.3.o_proj": "row",
        "layers.3.down": "row",
        "layers.3.norm": "replicated",
        "head": "vocabulary",
    }
    assert table("llama") == expected
    assert table("gpt2") == table() == expected | {"layers.3.upper": "column"}
    assert table("llama", use_default_specs=False) == expected | {"layers.3.upper": "replicated"}
    assert load_config({}).tensor_table(names) == {}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"parallel": {"tensor_table": {"(": "row"}}}, "parallel.tensor_table.*regular expression"),
        ({"parallel": {"tensor_table": {"a": "diagonal"}}}, "tensor_table.a.*column, row, vocabulary, partial"),
        (
            {"tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": ["["]}]}}},
            r"layer_specs\[0\].patterns.*regular expression",
        ),
        ({"pipeline": {"partition": "type:("}}, "pipeline.partition.*regular expression"),
        ({"pipeline": {"partition": "fastest"}}, 'pipeline.partition.*"uniform"'),
        ({"pipeline": {"stages": "many"}}, "pipeline.stages"),
        ({"parallel": {"tp": 0}}, "parallel.tp"),
        ({"parallel": {"tpp": 2}}, "nearest is parallel.tp"),
    ],
)
def test_invalid_values_are_refused(source: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(source)


def test_defaults_that_follow_from_other_keys() -> None:
    assert load_config({"pipeline": {"schedule": "interleaved"}}).pipeline.resolved_virtual_stages == 2
    assert load_config({"pipeline": {"schedule": "gpipe"}}).pipeline.resolved_virtual_stages == 1
    assert (
        load_config({}).pipeline.partition_method
        == load_config({"pipeline": {"partition": "best"}}).pipeline.partition_method
        == "parameters"
    )
    assert load_config({"pipeline": {"partition": "type:Block"}}).pipeline.partition_method == "type:Block"
    assert load_config({}).tp_overlap_chunks == 1
    assert load_config({"tensor_parallel": {"tp_overlap_comm": True}}).tp_overlap_chunks == 2
    chunks = {"parallel": {"tp_overlap_chunks": 1}, "tensor_parallel": {"tp_overlap_comm": True}}
    assert load_config(chunks).tp_overlap_chunks == 1
