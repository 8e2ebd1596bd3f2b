"""Tests of tensor-parallel plans: their entries, their fit to any number of ranks, and refused models."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.causal_models import CAUSAL, build
from windlass.base.errors import ConfigError, ModelError
from windlass.comm.mesh_axis import single_rank_axis
from windlass.parallel.experts import MixtureOfExperts
from windlass.parallel.pipeline import PipelineSequential
from windlass.parallel.pipeline.staged_model import split_into_stages
from windlass.parallel.placement import has_placement
from windlass.parallel.tensor import ShardStyle, apply_tensor_parallel, build_tensor_parallel_plan
from windlass.parallel.tensor.rank_ranges import count_rank_elements
from windlass.parallel.tensor.tensor_table import find_unused_keys


def test_a_plan_prints_as_a_table() -> None:
    assert str(build_tensor_parallel_plan(build("llama"), 3)).splitlines() == [
        "tensor parallelism over 3 ranks, from the model's own tp_plan",
        "  model.embed_tokens                   vocabulary      41 tokens: 14 + 14 + 13",
        "  model.layers.{0-1}.self_attn.q_proj  column          4 heads of 8: 16 + 8 + 8",
        "  model.layers.{0-1}.self_attn.k_proj  column, shared  2 heads of 8: 8 each",
        "  model.layers.{0-1}.self_attn.v_proj  column, shared  2 heads of 8: 8 each",
        "  model.layers.{0-1}.self_attn.o_proj  row             4 heads of 8: 16 + 8 + 8",
        "  model.layers.{0-1}.mlp.gate_proj     column          48 features: 16 each",
        "  model.layers.{0-1}.mlp.up_proj       column          48 features: 16 each",
        "  model.layers.{0-1}.mlp.down_proj     row             48 features: 16 each",
        "  lm_head                              vocabulary      41 tokens: 14 + 14 + 13",
        "  replicated: only norms and biases",
    ]


@pytest.mark.parametrize("name", CAUSAL)
def test_every_model_of_the_zoo_has_a_plan_on_the_meta_device(name: str) -> None:
    """Plans are made on the meta device, and the parts of all ranks add up to the whole."""
    with torch.device("meta"):
        model = CAUSAL[name]()
    for ranks in (2, 3, 4) if name not in ("gpt2", "cohere") else (2,):
        plan = build_tensor_parallel_plan(model, ranks)
        for cut in plan.shards:
            if cut.rank_ranges and cut.style is not ShardStyle.COLUMN_SHARED:
                assert sum(count_rank_elements(cut.rank_ranges)) == cut.sharded_size, cut
        named = {cut.name for cut in plan.shards}
        assert any(name.endswith(("embed_tokens", "wte", "word_embeddings", "embed_in")) for name in named)


def test_a_1024_rank_plan_of_a_large_model_owns_every_element_once() -> None:
    with torch.device("meta"):
        model = CAUSAL["llama"](
            vocab_size=128_256,
            hidden_size=16_384,
            intermediate_size=53_248,
            num_hidden_layers=1,
            num_attention_heads=1024,
            num_key_value_heads=1024,
        )
    plan = build_tensor_parallel_plan(model, 1024)
    for cut in plan.shards:
        assert sum(count_rank_elements(cut.rank_ranges)) == cut.sharded_size
        assert max(count_rank_elements(cut.rank_ranges)) <= 2 * cut.sharded_size / 1024


def test_tensor_parallelism_on_one_rank_does_not_change_the_model() -> None:
    model = build("llama")
    before = {name: value.shape for name, value in model.named_parameters()}
    build_tensor_parallel_plan(model, 4)
    plan = apply_tensor_parallel(model, single_rank_axis("tp"))
    assert plan.ranks == 1
    assert {name: value.shape for name, value in model.named_parameters()} == before
    assert not any(has_placement(value) for value in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# ---------------------------------------------------------------------------------------------------------- bad input


class Unknown(nn.Module):
    """Model of two blocks of one kind."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))


def linears(**sizes: tuple[int, int]) -> nn.Module:
    """Return a module with linear layers of these names and sizes."""
    module = nn.Module()
    for name, (inputs, outputs) in sizes.items():
        setattr(module, name, nn.Linear(inputs, outputs))
    return module


def beside(block: nn.Module, **more: Any) -> nn.Module:
    """Set further attributes of the block, and return it."""
    for name, value in more.items():
        setattr(block, name, value)
    return block


ATTENTION = {"q_proj": (8, 8), "k_proj": (8, 8), "v_proj": (8, 8), "o_proj": (8, 8)}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "fused": (
        lambda: beside(linears(qkv=(8, 24), proj=(8, 8)), num_heads=2),
        r"can't shard blocks\.0\.qkv: the order of 2 query and 2 key heads in its 24 features is unknown",
        r'"blocks\\.\\d+\\.qkv": "column:8+8+8", "blocks\\.\\d+\\.proj": "row"',
    ),
    "no heads": (
        lambda: linears(**ATTENTION),
        r"can't shard blocks\.0: its number of heads is unknown",
        r'"blocks\\.\\d+\\.q_proj": "column of 8 heads"',
    ),
    "two ends": (
        lambda: beside(linears(**ATTENTION, gate=(8, 8)), num_heads=2),
        r"can't shard blocks\.0: of o_proj, gate none was identified as the consumer",
        r'"blocks\\.\\d+\\.o_proj": "row"',
    ),
    "odd": (
        lambda: beside(nn.Module(), inner=linears(up=(8, 12))),
        r"can't shard blocks\.0\.inner\.up: no other layer consumes its output",
        r'"blocks\\.\\d+\\.inner\\.up": "replicated"',
    ),
    "no chain": (
        lambda: linears(up=(8, 12), across=(12, 12), down=(12, 8)),
        r"can't shard blocks\.0: its layers do not form a chain: up 8 to 12, across 12 to 12, down 12 to 8",
        r'"blocks\\.\\d+\\.across": "replicated"',
    ),
    "halves": (
        lambda: linears(up=(8, 24), down=(12, 8)),
        r"can't shard blocks\.0\.up: down has half as many input features as its 24 output features, and their "
        r"pairing is unknown",
        r'"blocks\\.\\d+\\.up": "column:12+12"',
    ),
    "norm between": (
        lambda: beside(linears(up=(8, 12), down=(12, 8)), norm=nn.LayerNorm(12)),
        r"can't shard blocks\.0\.norm: it computes with all 12 input features of down",
        r'"blocks\\.\\d+\\.down": "row"',
    ),
    "norm of all heads": (
        lambda: beside(linears(**ATTENTION), num_heads=2, head_dim=4, q_norm=nn.LayerNorm(8)),
        r"can't shard blocks\.0\.q_norm: it normalizes 8 features at once, over heads of 4 that are on several ranks",
        r'"blocks\\.\\d+\\.q_proj": "replicated"',
    ),
    "norms in a list": (
        lambda: beside(linears(**ATTENTION), num_heads=2, q_norm=nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(4)])),
        r"can't shard blocks\.0\.q_norm: norms in a list belong to single heads",
        r'"blocks\\.\\d+\\.o_proj": "replicated"',
    ),
    "a parameter": (
        lambda: beside(linears(**ATTENTION), num_heads=2, slope=nn.Parameter(torch.zeros(2))),
        r"can't shard blocks\.0\.slope: the role of a parameter of shape \(2,\) in attention of 2 heads is unknown",
        r'"blocks\\.\\d+\\.slope": "partial"',
    ),
    "a convolution": (
        lambda: beside(linears(up=(8, 12), down=(12, 8)), mix=nn.Conv1d(8, 8, 3)),
        r"can't shard blocks\.0\.mix: its weight of shape \(8, 8, 3\) does not belong to a linear layer",
        r'"blocks\\.\\d+\\.mix": "replicated"',
    ),
    "too many ranks": (
        lambda: beside(linears(**ATTENTION), num_heads=1),
        r"can't shard blocks\.0: 1 query heads are too few for 2 ranks; use at most 1",
        r'"blocks\\.\\d+\\.q_proj": "replicated"',
    ),
    "heads that don't divide": (
        lambda: beside(linears(**ATTENTION), num_heads=3),
        r"can't shard blocks\.0: 3 query heads, 3 key heads and 8 input features of o_proj don't match",
        r'"blocks\\.\\d+\\.o_proj": "row of 8 heads"',
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ambiguous_modules_are_refused_with_table_entries(case: str) -> None:
    block, message, lines = REFUSED[case]
    model = Unknown(block)
    with pytest.raises(ModelError, match=message) as refusal:
        apply_tensor_parallel(model, _Two("tp"))
    assert lines in str(refusal.value)
    assert not any(has_placement(value) for value in model.parameters())


class _Two:
    """Fake axis of two ranks without collectives, because a refused model must not start one."""

    size, index = 2, 0

    def __init__(self, name: str) -> None:
        self.name = name


def test_models_without_shardable_modules_are_refused() -> None:
    with pytest.raises(ModelError, match="found no layer to shard in this Sequential; write parallel.tensor_table"):
        build_tensor_parallel_plan(nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU()), 2, {"0": "replicated"})
    with pytest.raises(ModelError, match=r"backbone\.layers\.0\.mixer: of x_proj, dt_proj, out_proj none was"):
        from transformers import MambaConfig, MambaForCausalLM

        build_tensor_parallel_plan(MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2)), 2)


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn: 4 query heads are too few for 5 ranks"):
        build_tensor_parallel_plan(build("llama"), 5)
    with pytest.raises(ModelError, match="2 key heads are too few for 3 ranks"):
        build_tensor_parallel_plan(build("falcon", new_decoder_architecture=True, num_kv_heads=2), 3)
    with pytest.raises(ModelError, match=r"mlp\.experts: 3 features of an expert are too few for 4 ranks"):
        build_tensor_parallel_plan(build("mixtral", intermediate_size=3), 4)
    with pytest.raises(ModelError, match=r"k_norm: its weights of shape \(2, 8\) can't be sharded for 2 heads"):
        build_tensor_parallel_plan(build("cohere"), 3)
    with pytest.raises(ModelError, match="3 tokens are too few for 4 ranks"):
        build_tensor_parallel_plan(build("llama", vocab_size=3), 4)


def test_attention_that_keeps_the_features_of_its_input_is_refused_or_replicated() -> None:
    from transformers import TrOCRConfig, TrOCRForCausalLM

    sizes = {"d_model": 16, "decoder_ffn_dim": 24, "decoder_layers": 1, "decoder_attention_heads": 4}
    with torch.device("meta"):
        model = TrOCRForCausalLM(TrOCRConfig(vocab_size=40, max_position_embeddings=16, **sizes))
    with pytest.raises(ModelError, match="the forward of TrOCRAttention gives its result as many features as its inpu"):
        build_tensor_parallel_plan(model, 2)
    plan = build_tensor_parallel_plan(model, 2, {r".*_attn": "replicated", r".*_attn\..*": "replicated"})
    assert {cut.name.rpartition(".")[2] for cut in plan.shards} == {"embed_tokens", "fc1", "fc2", "output_projection"}


class _AttentionThatReshapesItsResult(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = self.head_dim = 4
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows, length, width = hidden_states.shape
        query, key, value = (
            layer(hidden_states).view(rows, length, -1, self.head_dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        found = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return self.o_proj(found).view(rows, length, width)


def test_attention_may_reshape_the_result_of_its_output_layer() -> None:
    model = nn.Sequential(_AttentionThatReshapesItsResult())
    plan = build_tensor_parallel_plan(model, 2, {r".*[qkv]_proj": "column", r".*o_proj": "row"})
    assert {cut.style for cut in plan.shards} == {ShardStyle.COLUMN, ShardStyle.ROW}


# ---------------------------------------------------------------------------------------------------------- the table


def test_table_overrides_the_plan_of_the_model() -> None:
    plan = build_tensor_parallel_plan(
        build("llama"), 2, {r"model\.layers\.\d+\.self_attn": "replicated", "lm_head": "replicated"}
    )
    assert plan.source == "the model's own tp_plan and the table"
    styles = {cut.name.rpartition(".")[2]: cut.style for cut in plan.shards}
    assert styles == {
        "embed_tokens": ShardStyle.VOCABULARY,
        "gate_proj": ShardStyle.COLUMN,
        "up_proj": ShardStyle.COLUMN,
        "down_proj": ShardStyle.ROW,
    }
    assert "model.layers.0.self_attn.q_proj" in plan.replicated and "lm_head" in plan.replicated


def test_nested_language_model_is_found() -> None:
    wrapper = nn.Module()
    wrapper.inside = build("llama")
    wrapper.value = nn.Linear(32, 1)
    alone, wrapped = build_tensor_parallel_plan(build("llama"), 2), build_tensor_parallel_plan(wrapper, 2)
    assert [f"inside.{cut.name}" for cut in alone.shards] == [cut.name for cut in wrapped.shards]
    assert [cut.rank_ranges for cut in alone.shards] == [cut.rank_ranges for cut in wrapped.shards]
    assert wrapped.replicated == ("value",)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_adapters_with_full_row_norms_are_refused_by_name() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=["q_proj"], use_dora=True))
    message = r"can't shard base_model\.model\.model\.layers\.0\.self_attn\.q_proj: .* are DoRA's or another variant"
    with pytest.raises(ModelError, match=message):
        build_tensor_parallel_plan(model, 2)


@pytest.mark.filterwarnings("ignore")
def test_experts_that_an_adapter_wraps_are_refused_by_name() -> None:
    peft = pytest.importorskip("peft")
    targets = ["gate_up_proj", "down_proj"]
    model = peft.get_peft_model(build("mixtral"), peft.LoraConfig(target_modules=[], target_parameters=targets))
    with pytest.raises(ModelError, match=r"can't shard .*mlp\.experts: .* an adapter may have replaced them"):
        build_tensor_parallel_plan(model, 2)


def test_tied_weights_are_sharded_together_or_not_at_all() -> None:
    plan = build_tensor_parallel_plan(build("gpt2"), 2, {"lm_head": "replicated"})
    assert plan.shard_of("transformer.wte") is None and plan.shard_of("lm_head") is None


STAGES = {
    "a tied head as vocabulary": ("gpt2", {"lm_head": "vocabulary"}, [{"transformer.wte"}, {"lm_head"}]),
    "a replicated tied head": ("gpt2", {"lm_head": "replicated"}, [set(), set()]),
    "a replicated tied embedding": ("gpt2", {r"transformer\.wte": "replicated"}, [set(), set()]),
    "a head as vocabulary": ("llama", {"lm_head": "vocabulary"}, [{"model.embed_tokens"}, {"lm_head"}]),
    "a layer": ("llama", {r"model\.layers\.0\..*": "replicated"}, [{"model.embed_tokens"}, {"lm_head"}]),
}


@pytest.mark.parametrize("case", STAGES)
def test_stages_of_a_pipeline_follow_a_table_of_the_full_model(case: str) -> None:
    name, table, expected = STAGES[case]
    for rank in range(2):
        model = build(name)
        split_into_stages(model, rank, 2)
        plan = build_tensor_parallel_plan(model, 2, table)
        assert {cut.name for cut in plan.shards if cut.style is ShardStyle.VOCABULARY} == expected[rank]
        assert any(cut.style is ShardStyle.ROW for cut in plan.shards) == (case != "a layer" or rank == 1)


def test_stages_of_a_row_of_layers_need_no_layer_that_the_table_names_and_none_to_shard() -> None:
    table = {"2": "replicated", r"1\.0": "column", r"1\.2": "row"}
    for rank, cuts in ((0, 0), (1, 2)):
        mlp = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8))
        model = PipelineSequential([nn.Embedding(9, 8), mlp, nn.Linear(8, 9)], partition_method=[2, 1, 1])
        model.keep_stages(rank, 2)
        assert len(build_tensor_parallel_plan(model, 2, table).shards) == cuts


def test_a_tied_head_stays_whole_on_a_stage_without_its_embedding_that_needs_all_rows() -> None:
    for rank in range(2):
        model = build("gpt2")
        model.get_submodule("transformer.wte").scale_grad_by_freq = True
        split_into_stages(model, rank, 2)
        assert not any(one.style is ShardStyle.VOCABULARY for one in build_tensor_parallel_plan(model, 2).shards)


def test_unused_keys_of_a_stage_are_found() -> None:
    table = {"2": "replicated", r"1\.\d": "column", "9": "replicated"}
    for rank, unused in ((0, {"2", r"1\.\d", "9"}), (1, {"9"})):
        mlp = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8))
        model = PipelineSequential([nn.Embedding(9, 8), mlp, nn.Linear(8, 9)], partition_method=[2, 1, 1])
        model.keep_stages(rank, 2)
        assert find_unused_keys(model, table).keys() == unused


def test_refused_modules_may_be_excluded() -> None:
    model = Unknown(REFUSED["a convolution"][0])
    plan = build_tensor_parallel_plan(model, 2, {r"blocks\.\d+\.mix": "replicated"})
    assert [cut.style for cut in plan.shards] == [ShardStyle.COLUMN, ShardStyle.ROW] * 2


WRONG = {
    "no regular expression": ({"(": "row"}, r"has the key '\(', which is not a regular expression"),
    "another word": ({"lm_head": "diagonal"}, "has 'diagonal' for 'lm_head'; allowed are column, row, vocabulary"),
    "no module": (
        {r"model\.layer\.\d": "row"},
        r"has the key 'model\\\\.layer\\\\.\\\\d', which matches no module.* nearest names",
    ),
    "a vocabulary without a module": (
        {r"model\.embed_tokens\.weight": "vocabulary"},
        "matches the parameter model.embed_tokens.weight and no module; write a key that matches its embedding",
    ),
    "sections of a row": ({r".*down_proj": "row:3+4"}, "only column layers have sections"),
    "heads of sections": ({r".*q_proj": "column:16+16 of 1+2+3 heads"}, "3 numbers of heads for 2 sections"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_table_is_refused(case: str) -> None:
    table, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        build_tensor_parallel_plan(build("llama"), 2, table)


MISFITS = {
    "a column alone": (
        {r".*mlp\.(gate|up)_proj": "replicated", r".*down_proj": "column"},
        "its output features are sharded, but no row layer consumes them",
    ),
    "a row alone": (
        {r".*mlp\.(gate|up)_proj": "replicated", r".*down_proj": "row"},
        "its input features are sharded, but no column layer computes them",
    ),
    "sections too small": ({r".*q_proj": "column:16+8"}, r"sections of 16\+8 don't add up to its 32 output features"),
    "a head as vocabulary": ({r".*norm": "vocabulary"}, "its weight is used by a LlamaRMSNorm"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_table_that_does_not_fit_the_model_is_refused(case: str) -> None:
    table, message = MISFITS[case]
    with pytest.raises(ModelError, match=message):
        build_tensor_parallel_plan(build("llama"), 2, table)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="tp_overlap_chunks = 0; write at least 1"):
        apply_tensor_parallel(build("llama"), single_rank_axis("tp"), tp_overlap_chunks=0)
    with pytest.raises(ConfigError, match="tp_sequence_norms leaves no all-reduce .* tp_overlap_chunks is 2"):
        apply_tensor_parallel(build("llama"), single_rank_axis("tp"), tp_overlap_chunks=2, tp_sequence_norms=True)
    flat = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    with pytest.raises(ModelError, match="tp_sequence_norms shards activations between the layers of a ModuleList"):
        apply_tensor_parallel(flat, single_rank_axis("tp"), tp_sequence_norms=True)


def test_distributed_expert_modules_are_not_sharded() -> None:
    mixture = MixtureOfExperts(
        8, nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), 2, enable_expert_tensor_parallelism=True
    )
    model = nn.ModuleDict({"mixture": mixture})
    build_tensor_parallel_plan(model, 2)
    mixture.deepspeed_moe["experts"].axis = SimpleNamespace(size=2)
    with pytest.raises(ModelError, match="mixture has enable_expert_tensor_parallelism=True.* over 2 ranks; pass a St"):
        build_tensor_parallel_plan(model, 2)


def test_experts_that_are_the_only_layers_need_the_option() -> None:
    expert = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    with pytest.raises(ModelError, match="the experts of mixture are sharded if it has enable_expert_tensor_paralleli"):
        build_tensor_parallel_plan(nn.ModuleDict({"mixture": MixtureOfExperts(8, expert, 2)}), 2)
