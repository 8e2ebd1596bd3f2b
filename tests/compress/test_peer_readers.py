"""Tests that the packages compressed-tensors and gguf read the same numbers from files that windlass wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.compress.test_gguf_blocks import NAMES_AND_KINDS, pack_rows
from tests.compress.test_packed_directory import IDS, body, rounded, saved
from windlass.compress.gguf_blocks import find_block_type
from windlass.compress.gguf_file import read_gguf, write_gguf
from windlass.compress.packed_directory import write_packed_directory
from windlass.kernels.weight_format import get_weight_format

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.mark.parametrize(
    "name",
    ["int8", "fp8", "int8_g32", "int4_g32", "int4_g32_zp", "int4", "int3_g32", "int3_zp", "int2_g32_zp", "ternary_g32"],
)
def test_compressed_tensors_reads_the_same_numbers(name: str, tmp_path: Path) -> None:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    saved(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", name)
    entry = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    scheme = next(iter(QuantizationConfig.model_validate(entry).config_groups.values()))
    compressor = BaseCompressor.get_value_from_registry(entry["format"])
    tensors, form = load_file(tmp_path / "packed" / "model.safetensors"), get_weight_format(name)
    layer = "model.layers.1.mlp.down_proj"
    packed = {part: tensors[f"{layer}.{part}"] for part in form.file_form(1, 1)}
    # The compressor multiplies in the dtype of the scale, so that nothing is rounded with a scale in fp32.
    wide = compressor.decompress({**packed, "weight_scale": packed["weight_scale"].float()}, scheme)
    assert torch.equal(wide["weight"], form.unpack(packed))


@pytest.mark.parametrize("name", ["int4_g32", "int8_g32"])
def test_transformers_runs_a_written_directory(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = saved(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", name)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    with torch.no_grad():
        wanted = rounded(model, body(name))(IDS).logits
        torch.testing.assert_close(found(IDS).logits, wanted, rtol=2e-2, atol=2e-2)  # float16 scales round products


@pytest.mark.parametrize(("name", "kind"), [pair for pair in NAMES_AND_KINDS if pair[1] != "Q1_0"])
def test_gguf_reads_the_same_numbers(name: str, kind: str) -> None:
    """The package has no reader of Q1_0."""
    import gguf

    weights, data, _ = pack_rows(name, kind)
    found = gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(torch.from_numpy(found), weights)


def write_model(tmp_path: Path, name: str, **sizes: Any) -> Any:
    from tests.causal_models import build

    torch.manual_seed(3)
    model = build("llama", hidden_size=256, intermediate_size=256, max_position_embeddings=96, **sizes).eval()
    model.save_pretrained(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", name)
    return rounded(model, body(name))


@pytest.mark.parametrize("name", ["int8_g32", "int4_g128", "ternary", "binary_g128"])
def test_a_whole_model_as_gguf(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, name)
    types = write_gguf(tmp_path / "packed", tmp_path / "model.gguf")
    assert (
        "token_embd.weight: F32" in types
        and f"blk.0.ffn_up.weight: {find_block_type(get_weight_format(name), 256).name}" in types
    )
    found = {key: get_weight_format(form).unpack(packed) if form not in ("fp32", "bf16") else packed["weight"]
             for key, (form, packed) in read_gguf(tmp_path / "model.gguf").items()}  # fmt: skip
    layer, heads = model.model.layers[1], model.config.num_attention_heads
    assert torch.equal(found["blk.1.ffn_down.weight"], layer.mlp.down_proj.weight)
    assert torch.equal(found["token_embd.weight"], model.model.embed_tokens.weight)
    query = layer.self_attn.q_proj.weight  # pairs of a rotation stand beside each other in GGUF
    paired = query.view(heads, 2, -1, 256).transpose(1, 2).reshape(query.shape)
    assert torch.equal(found["blk.1.attn_q.weight"], paired)
