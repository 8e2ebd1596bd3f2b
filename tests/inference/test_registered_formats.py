"""Law: an engine with a user's weight format generates what the model with unpacked weights does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.causal_models import VOCABULARY, build_longer
from tests.inference.greedy_reference import assert_greedy, make_prompts, round_layers
from tests.registered_formats import HalvedNibbles, Nibbles, OneScale, RowScales, registered
from windlass.base.errors import ModelError, WeightFormatError
from windlass.compress.packed_directory import write_packed_directory
from windlass.inference.llm import LLM
from windlass.inference.sampling_params import SamplingParams
from windlass.kernels.packed_gemm import join_packed
from windlass.kernels.packed_linear import PackedEmbedding, PackedLinear, is_packed_parameter, pack_linear_layers
from windlass.parallel.narrow_to_ranges import narrow_to_ranges
from windlass.parallel.tensor.packed_sharding import shard_packed

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
SMALL: dict[str, Any] = {"kv_cache_tokens": 256, "max_model_len": 80, "skip_tokenizer_init": True}


@pytest.fixture(autouse=True)
def formats() -> Iterator[None]:
    with registered():
        yield


@pytest.mark.parametrize(
    ("weights", "changes", "products"),
    [
        ("my4", {}, 15),  # two layers of seven products each, and the head
        ("my8", {"intermediate_size": 45}, 15),
        ("my8", {"intermediate_size": 45, "tie_word_embeddings": True}, 15),
        ("my1", {"tie_word_embeddings": True}, 15),
        ("my8_rows", {"intermediate_size": 45, "tie_word_embeddings": True}, 9),
    ],
)
def test_loaded_models_generate_with_a_registered_format(
    weights: str, changes: dict[str, Any], products: int, tmp_path: Path
) -> None:
    model = build_longer("llama", **changes)
    model.save_pretrained(tmp_path)
    packed = build_longer("llama", **changes)
    pack_linear_layers(packed, weights, lambda name: name != "lm_head")
    prompts = make_prompts(4, VOCABULARY, 40)
    round_layers(model, weights)
    for given, options in ((tmp_path, {"weights": weights}), (tmp_path, {"weights": weights, "weights_tier": "host"})):
        with LLM(given, **options, **SMALL) as llm:
            outputs = llm.generate(prompts, GREEDY)
            if "weights_tier" not in options:
                assert len(llm.engine.runner._packed.groups) == products
        assert_greedy(model, outputs)
    model.lm_head.weight = packed.lm_head.weight
    with LLM(packed, deterministic=True, **SMALL) as llm:
        assert_greedy(model, llm.generate(prompts, GREEDY))


def test_rows_and_parts_of_registered_formats() -> None:
    weight, index = torch.randn(5, 6), torch.tensor([4, 0, 4])
    for form in (Nibbles(), OneScale(), RowScales()):
        table = PackedEmbedding(5, 6, weight_format=form)
        table.pack(weight)
        assert torch.equal(table(index), table.unpack()[index])
        assert all(is_packed_parameter(name, one.dtype) for name, one in table.named_parameters())
    parts = [form.pack(one) for one in (weight, weight[:3] * 2)]
    assert torch.equal(form.unpack(join_packed(form, parts)), torch.cat([form.unpack(one) for one in parts]))
    with pytest.raises(WeightFormatError, match="'my8' has no join"):
        join_packed(OneScale(), parts)


def test_ranks_keep_the_codes_of_their_parts() -> None:
    weight = torch.randn(9, 10)
    for form in (Nibbles(), OneScale(), RowScales()):
        for dim, ranges in ((0, ((0, 5),)), (0, ((1, 4), (7, 9))), (1, ((4, 10),)), (1, ((0, 2), (6, 8)))):
            layer = PackedLinear(10, 9, weight_format=form)
            layer.pack(weight)
            whole = layer.unpack()
            shard_packed("proj", layer, dim, ranges, "tp")
            assert torch.equal(layer.unpack(), narrow_to_ranges(whole, dim, ranges))
    layer = PackedLinear(10, 9, weight_format=Nibbles())
    with pytest.raises(ModelError, match="proj is packed as 'my4' .*: my4 packs an even number of features, not 5"):
        shard_packed("proj", layer, 1, ((0, 5),), "tp")
    layer = PackedLinear(12, 8, weight_format=HalvedNibbles())
    with pytest.raises(ModelError, match="'my4_halves' .* over tp: a part of its tensors is not the packed form of a"):
        shard_packed("proj", layer, 1, ((0, 6),), "tp")
    layer.pack(torch.ones(8, 12))
    shard_packed("proj", layer, 0, ((4, 8),), "tp")
    assert torch.equal(layer.unpack(), torch.ones(4, 12))


def test_a_format_whose_tensors_do_not_fit_is_refused(tmp_path: Path) -> None:
    build_longer("llama", intermediate_size=45).save_pretrained(tmp_path)
    with pytest.raises(WeightFormatError, match=r"'scale'.* are not of format 'my8_wrong', whose file_form\(32, 32\)"):
        LLM(tmp_path, weights="my8_wrong", **SMALL)
    with pytest.raises(WeightFormatError, match="my4 packs an even number of features, not 45"):
        LLM(tmp_path, weights="my4", **SMALL)
    with pytest.raises(WeightFormatError, match=r"'my8' has the tensors codes, scale, .* find the layer 'model"):
        write_packed_directory(tmp_path, tmp_path / "packed", "my8")
    with pytest.raises(WeightFormatError, match="'scale'.* do not fit a layer of format 'my8_wrong'"):
        PackedLinear(4, 4, weight_format="my8_wrong").pack(torch.ones(4, 4))
