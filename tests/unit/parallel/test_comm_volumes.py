"""Tests of the communication volume formulas of each axis.

They are compared with figures of the papers, sums that must hold, and counted collectives on 1,024 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from windlass.base.errors import ConfigError
from windlass.comm.mesh_axis import MeshAxis
from windlass.comm.mesh_shape import DATA_AXES, EXPERT_DATA_AXES, MeshShape
from windlass.comm.rank_group import RankGroup
from windlass.parallel import autograd_collectives
from windlass.parallel.comm_volumes import (
    CommVolume,
    StepWorkload,
    compute_data_parallel_volumes,
    compute_pipeline_volumes,
    compute_sequence_parallel_volumes,
    compute_step_volumes,
    count_local_layers,
    count_local_parameters,
    sum_bytes_by_axis,
)
from windlass.parallel.model_shape import PRESETS, ModelShape, from_transformers, parse_model_shape

# ------------------------------------------------------------------------------------------------------ the model

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied llama": {**LLAMA, "tie_word_embeddings": True},
    "wide heads": {**LLAMA, "model_type": "qwen3", "head_dim": 32},
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 16},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_model_shape_counts_parameters_as_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = FAMILIES[family]
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    left_out = ("bias", "wpe", "q_norm", "k_norm", "ln_")  # ln_: two tensors per norm, but a model shape counts one
    named = dict(model.named_parameters())
    counted = sum(p.numel() for name, p in named.items() if not any(word in name for word in left_out))
    shape = from_transformers(made.to_dict())
    norms = (2 * shape.layers + 1) * shape.hidden if family == "gpt2" else 0
    assert shape.numel == counted + norms


def test_presets_have_the_sizes_in_their_names() -> None:
    assert {name: round(shape.numel / 1e9, 1) for name, shape in PRESETS.items()} == {
        "7b": 6.7,
        "70b": 70.6,
        "8x7b": 46.7,
    }


def test_model_shape_is_parsed_from_text_or_a_file(tmp_path: Any) -> None:
    words = parse_model_shape("hidden=64,layers=3,heads=4,kv_heads=2,vocabulary=96,intermediate=160,tied=1")
    assert words == ModelShape(64, 3, 4, 96, kv_heads=2, intermediate=160, tied=True)
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96, '
        '"num_key_value_heads": 2, "intermediate_size": 160, "tie_word_embeddings": true}'
    )
    assert parse_model_shape(str(tmp_path)) == parse_model_shape(str(tmp_path / "config.json")) == words
    for text, reported in (
        ("nothing", "write 7b, 70b, 8x7b, a config.json"),
        ("hidden=64", "lacks layers, heads, vocabulary"),
        ("hidden=64,depth=3", "'depth=3'"),
        ("hidden=64,layers=1,heads=5,vocabulary=9", "64 is not a multiple of heads 5"),
        ("hidden=64,layers=0,heads=4,vocabulary=9", "layers is 0"),
        ("hidden=64,layers=1,heads=4,vocabulary=9,experts=2", "top_k = 0 of 2 experts"),
    ):
        with pytest.raises(ConfigError, match=reported):
            parse_model_shape(text)
    with pytest.raises(ConfigError, match="none of hidden_size, n_embd, d_model"):
        from_transformers({})
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}
    with pytest.raises(ConfigError, match="none of num_experts_per_tok"):
        from_transformers({**sizes, "num_local_experts": 64, "top_k": 50})  # top_k belongs to sampling, not to routing


# ---------------------------------------------------------------------------------------------------- the formulas

SHAPE = ModelShape(hidden=256, layers=8, heads=16, kv_heads=8, vocabulary=1024, intermediate=512)
MIXED = ModelShape(hidden=256, layers=8, heads=16, vocabulary=1024, intermediate=512, experts=8, top_k=2)


def nbytes_along(found: list[CommVolume], axis: str) -> int:
    return sum_bytes_by_axis(found).get(axis, 0)


def test_one_rank_sends_nothing() -> None:
    for shape in (SHAPE, MIXED):
        assert compute_step_volumes(shape, MeshShape(), StepWorkload(tokens=64, zero_stage=3)) == []


@pytest.mark.parametrize(("stage", "multiple"), [(0, 2), (1, 2), (2, 4), (3, 9)])
def test_zero_volume_equals_the_paper(stage: int, multiple: int) -> None:
    """2P a step at stages 0 and 1; 3P a micro-batch at stage 3; at stage 2, P a micro-batch and P a step."""
    grid, work = MeshShape(dp_shard=4), StepWorkload(1, micro_batches=3, zero_stage=stage, parameter_bytes=4)
    assert nbytes_along(compute_step_volumes(SHAPE, grid, work), "data") == multiple * SHAPE.numel * 4 * 3 // 4


def test_replicas_reduce_only_their_shards() -> None:
    results = list(
        compute_data_parallel_volumes(
            "data", 1024, 8, 2, StepWorkload(1, zero_stage=3, gradient_bytes=4, parameter_bytes=2)
        )
    )
    assert [(item.operation, item.nbytes) for item in results] == [
        ("reduce", 1024 * 4 * 3 // 4),
        ("gather", 2 * 1024 * 2 * 3 // 4),
        ("replicate", 2 * (1024 // 4) * 4 * 1 // 2),
    ]
    near = list(
        compute_data_parallel_volumes("data", 1024, 8, 1, StepWorkload(1, zero_stage=3, backward_gather_ranks=2))
    )
    assert near[1].nbytes == 1024 * 2 * 7 // 8 + 1024 * 2 * 1 // 2


def test_ulysses_volume_is_4_n_h_over_p_per_forward() -> None:
    many = ModelShape(hidden=256, layers=1, heads=16, vocabulary=9)
    (result, ring) = compute_sequence_parallel_volumes(many, 1, 16, 1, StepWorkload(tokens=4096))
    assert result.nbytes == 2 * (4 * 4096 * 256 // 16) * 2 * 15 // 16  # 2 passes, 2 bytes an element, 15 of 16 ranks
    assert ring.nbytes == 0
    fewer = next(iter(compute_sequence_parallel_volumes(SHAPE, 1, 16, 1, StepWorkload(tokens=4096))))
    assert fewer.nbytes == result.nbytes  # 8 key heads on 16 ranks: each goes to two ranks, so 16 are sent
    (four, _) = compute_sequence_parallel_volumes(SHAPE, 1, 4, 1, StepWorkload(tokens=4096))
    (full, _) = compute_sequence_parallel_volumes(many, 1, 4, 1, StepWorkload(tokens=4096))
    assert four.nbytes * 4 == full.nbytes * 3  # q, k, v and output: 1 + 1/2 + 1/2 + 1 = 3 of 4


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("stages", [2, 5])
def test_activations_and_gradients_cross_each_stage_boundary_once(stages: int, chunks: int) -> None:
    work = StepWorkload(1, micro_batches=4, virtual_stages=chunks)
    received = {
        place: [item.nbytes for item in compute_pipeline_volumes(100, stages, work, place == 0, place == stages - 1)]
        for place in range(stages)
    }
    passed = {place: [0, 0] for place in range(stages)}
    for _ in range(work.micro_batches):
        for part in range(stages * chunks - 1):  # each virtual stage except the last
            passed[(part + 1) % stages][0] += 100
            passed[part % stages][1] += 100
    assert received == passed


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans())
def test_parameters_of_stages_and_shards_sum_to_the_model(pp: int, tp: int, ep: int, tied: bool, experts: bool) -> None:
    base = MIXED if experts else SHAPE
    shape = ModelShape(
        hidden=48, layers=8, heads=24, vocabulary=96, intermediate=96, tied=tied,
        experts=12 if experts else 0, top_k=base.top_k,
    )  # fmt: skip
    grid = MeshShape(pp=pp, tp=tp, ep=ep)
    dense, special = zip(*(count_local_parameters(shape, grid, place) for place in range(pp)), strict=True)
    copied = (tp - 1) * (shape.layers * shape.replicated_numel + shape.hidden)
    again = shape.embedding_numel if tied and pp > 1 else 0
    assert sum(dense) * tp + sum(special) * tp * ep == shape.numel + copied + again
    assert sum(count_local_layers(shape.layers, pp, place) for place in range(pp)) == shape.layers


def test_sequence_parallel_norms_add_nothing_and_recomputation_half() -> None:
    grid = MeshShape(tp=4)
    plain, cut = (compute_step_volumes(SHAPE, grid, StepWorkload(64, tp_sequence_norms=cut)) for cut in (False, True))
    ends = 2 * 64 * SHAPE.hidden * 2 * 3 // 4  # gathered at the ends of layers, forward and backward
    assert nbytes_along(plain, "tp") == nbytes_along(cut, "tp") - ends
    assert {item.operation for item in plain} == {"all_reduce"}
    loss = next(item.nbytes for item in plain if "loss" in item.tensors)
    again = compute_step_volumes(SHAPE, grid, StepWorkload(64, recompute=True))
    often = 4 * SHAPE.layers + 2
    assert (nbytes_along(again, "tp") - loss) * often == (nbytes_along(plain, "tp") - loss) * (often + 2 * SHAPE.layers)


# -------------------------------------------------------------------------------------- counted, on 1,024 ranks


@contextmanager
def world(rank: int, grid: MeshShape) -> Iterator[dict[str, MeshAxis]]:
    """Yield the axes of one rank among 1,024. Collectives are counted, complete at once and move no data."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=rank, world_size=grid.world, store=fake.FakeStore())

    def axis(name: str, *axes: str) -> MeshAxis:
        ranks = grid.along(rank, *axes)
        return MeshAxis(name, RankGroup(dist.new_group(list(ranks)), ranks, ranks.index(rank)))

    try:
        cut = tuple(axis for axis in DATA_AXES if axis != "dp_replicate")
        of_experts = tuple(axis for axis in EXPERT_DATA_AXES if axis != "dp_replicate")
        yield {
            **{name: axis(name, name) for name in ("pp", "ep", "sp", "tp", "dp_replicate")},
            "data": axis("data", *cut),
            "experts": axis("experts", *of_experts),
        }
    finally:
        dist.destroy_process_group()


def attend(x: torch.Tensor, model: ModelShape, sp: MeshAxis, tp: MeshAxis) -> torch.Tensor:
    """Exchange sequence shards for heads and back, as attention does: `x` is [local tokens, hidden]."""
    tokens, width = x.shape[0], model.resolved_head_dim
    heads, keys = model.heads // tp.size, model.resolved_kv_heads // tp.size
    here, kept = heads // sp.size, max(1, keys // sp.size)
    parts = []
    for count in (here, kept, kept):
        projected = x[:, :1].expand(tokens, sp.size * count * width).clone()
        rows = projected.view(tokens, sp.size, count * width).transpose(0, 1).reshape(sp.size * tokens, -1)
        parts.append(autograd_collectives.all_to_all(rows, sp))
    mixed = parts[0] + (parts[1] + parts[2]).sum()
    back = (
        autograd_collectives.all_to_all(mixed, sp)
        .view(sp.size, tokens, here * width)
        .transpose(0, 1)
        .reshape(tokens, -1)
    )
    return back[:, :1].expand(tokens, model.hidden)


def ring(model: ModelShape, seen: int, axis: MeshAxis, tp: MeshAxis) -> None:
    """Send keys and values round a ring and, in the backward, their gradients back."""
    block = torch.zeros(seen, model.resolved_kv_heads // tp.size * model.resolved_head_dim, dtype=torch.bfloat16)
    for _ in range(2):  # keys and values go round in the forward and again in the backward
        for _ in range(axis.size - 1):
            axis.shift([block, block])
    for _ in range(axis.size):
        axis.shift([block.float(), block.float()])


def layer(x: torch.Tensor, model: ModelShape, axes: dict[str, MeshAxis], cut_norms: bool) -> torch.Tensor:
    """Run the communication of one layer."""
    tp = axes["tp"]

    def enter(x: torch.Tensor) -> torch.Tensor:
        return (
            autograd_collectives.all_gather(x, tp, 0)
            if cut_norms
            else autograd_collectives.copy_to_parallel_region(x, tp)
        )

    def leave(x: torch.Tensor) -> torch.Tensor:
        return (
            autograd_collectives.reduce_scatter(x, tp, 0)
            if cut_norms
            else autograd_collectives.reduce_from_parallel_region(x, tp)
        )

    x = leave(attend(enter(x), model, axes["sp"], tp))
    if not model.experts:
        return leave(enter(x) * 1.5)
    entered = enter(x)
    weights = autograd_collectives.copy_to_parallel_region(
        torch.ones(entered.shape[0], model.top_k, 1, requires_grad=True), tp
    )
    chosen = autograd_collectives.all_to_all(entered.repeat_interleave(model.top_k, 0), axes["ep"])
    tier = autograd_collectives.all_to_all(chosen * 1.5, axes["ep"]).view(-1, model.top_k, model.hidden)
    return leave((tier * weights.to(tier.dtype)).sum(1))


def step(model: ModelShape, grid: MeshShape, work: StepWorkload, axes: dict[str, MeshAxis], pipe: int) -> None:
    """Run the communication of one training step on a rank of a stage."""
    sp, tp, pp = axes["sp"], axes["tp"], axes["pp"]
    tokens = work.tokens // sp.size
    for _ in range(work.micro_batches):
        y = x = torch.zeros(tokens, model.hidden, dtype=torch.bfloat16, requires_grad=True)
        between = torch.zeros(tokens, model.hidden, dtype=torch.bfloat16)
        if pipe == 0:
            y = autograd_collectives.reduce_from_parallel_region(x, tp)
        else:
            pp.shift([between])
        y = autograd_collectives.scatter_to_parallel_region(y, tp, 0) if work.tp_sequence_norms else y
        for _ in range(count_local_layers(model.layers, pp.size, pipe)):
            y = layer(y, model, axes, work.tp_sequence_norms)
        y = autograd_collectives.gather_from_parallel_region(y, tp, 0) if work.tp_sequence_norms else y
        if pipe == pp.size - 1:
            y = autograd_collectives.copy_to_parallel_region(y, tp)
            for _ in range(3):
                tp.all_reduce(torch.zeros(tokens))
        else:
            pp.shift([between], -1)
        y.sum().backward()
    reduce_and_gather(model, grid, work, axes, pipe)


def reduce_and_gather(
    model: ModelShape, grid: MeshShape, work: StepWorkload, axes: dict[str, MeshAxis], pipe: int
) -> None:
    for name, elements in zip(("data", "experts"), count_local_parameters(model, grid, pipe), strict=True):
        axis = axes[name]
        if not elements:
            continue
        often = work.micro_batches if work.zero_stage == 3 and not (grid.pp > 1 and work.unshards_once) else 1
        for _ in range(often):
            axis.reduce_scatter(torch.empty(elements))
            for _ in range(2 if work.zero_stage == 3 and not (grid.pp > 1 and work.unshards_once) else 1):
                axis.all_gather(torch.empty(elements // axis.size, dtype=torch.bfloat16))
        shard = torch.empty(elements // axis.size)
        axes["dp_replicate"].all_reduce(shard)


LAYOUTS = [
    (MeshShape(pp=4, dp_replicate=2, dp_shard=16, tp=8), SHAPE, StepWorkload(64, 2, zero_stage=3)),
    (MeshShape(pp=4, dp_replicate=2, dp_shard=16, tp=8), SHAPE, StepWorkload(64, 2, zero_stage=3, unshards_once=False)),
    (MeshShape(dp_shard=64, sp=4, tp=4), SHAPE, StepWorkload(64, 3, zero_stage=3)),
    (MeshShape(pp=2, dp_replicate=4, dp_shard=8, sp=8, tp=2), SHAPE, StepWorkload(64, 2, zero_stage=1)),
    (MeshShape(pp=2, dp_shard=64, sp=2, tp=4), SHAPE, StepWorkload(64, 2, zero_stage=1, tp_sequence_norms=True)),
    (MeshShape(pp=2, dp_shard=16, ep=4, sp=2, tp=4), MIXED, StepWorkload(64, 2, zero_stage=1)),
    (MeshShape(pp=4, dp_shard=4, ep=8, sp=8), MIXED, StepWorkload(64, 3, zero_stage=3, unshards_once=False)),
]


@pytest.mark.parametrize(("grid", "model", "work"), LAYOUTS)
def test_collectives_of_1024_ranks_equal_the_formulas(grid: MeshShape, model: ModelShape, work: StepWorkload) -> None:
    assert grid.world == 1024
    for rank in {0, 517, 1023}:
        pipe = grid.coordinates(rank)["pp"]
        with world(rank, grid) as axes:
            step(model, grid, work, axes, pipe)
            counted = {name: axis.traffic.bytes_moved.total() for name, axis in axes.items()}
        expected = sum_bytes_by_axis(
            item for item in compute_step_volumes(model, grid, work, pipe) if item.operation != "replicate"
        )
        replicas = sum_bytes_by_axis(
            item for item in compute_step_volumes(model, grid, work, pipe) if item.operation == "replicate"
        )
        expected["dp_replicate"] = sum(replicas.values())
        assert counted == {name: expected.get(name, 0) for name in counted}, rank


def test_hierarchical_ring_volume_equals_the_formula() -> None:
    grid, work = MeshShape(dp_shard=64, sp=16), StepWorkload(64, ulysses_degree=4)
    with world(517, grid) as axes:
        ranks = grid.along(517, "sp")
        place = ranks.index(517)
        near, far = ranks[place // 4 * 4 :][:4], ranks[place % 4 :: 4]
        inner = MeshAxis("ulysses", RankGroup(dist.new_group(list(near)), near, near.index(517)))
        outer = MeshAxis("ring", RankGroup(dist.new_group(list(far)), far, far.index(517)))
        x = torch.zeros(64 // 16, SHAPE.hidden, dtype=torch.bfloat16, requires_grad=True)
        attend(x, SHAPE, inner, axes["tp"]).sum().backward()
        tall = ModelShape(hidden=256, layers=1, heads=16, kv_heads=8 // 4, head_dim=16, vocabulary=9)
        ring(tall, 64 // 4, outer, axes["tp"])
    heads, rings = compute_sequence_parallel_volumes(SHAPE, 1, 16, 1, work)
    assert inner.traffic.bytes_moved == {"all_to_all": heads.nbytes}
    assert outer.traffic.bytes_moved == {"pass_on": rings.nbytes}
