"""Tests of GGUF's blocks: encoding and decoding put each weight at its place in ggml's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import windlass
from windlass.base.errors import ModelError
from windlass.compress import gguf_file
from windlass.compress.gguf_blocks import BLOCK_TYPES, BlockType, decode_blocks, encode_blocks, find_block_type
from windlass.compress.gguf_file import find_splitting
from windlass.compress.packed_model import load_packed_model
from windlass.compress.pruned_config import PRUNING_ENTRY
from windlass.inference.model_loading import load_model, load_tokenizer_of
from windlass.kernels.coded_formats import CodedWeightFormat
from windlass.kernels.weight_format import get_weight_format


def read_block(block: np.ndarray, kind: str) -> list[float]:
    """Return the weights of a block, one after the other."""
    at = 64 if kind == "TQ2_0" else 0
    scale = float(block[at : at + 2].view(np.float16)[0])
    codes = np.delete(block, [at, at + 1]).tolist()
    if kind == "Q8_0":
        return [scale * (code - 256 * (code > 127)) for code in codes]
    if kind == "Q4_0":
        return [scale * ((codes[i % 16] >> (4 * (i // 16)) & 15) - 8) for i in range(32)]
    if kind == "TQ2_0":
        return [scale * ((codes[32 * (i // 128) + i % 32] >> (2 * (i % 128 // 32)) & 3) - 1) for i in range(256)]
    return [scale * (1 if codes[i // 8] >> (i % 8) & 1 else -1) for i in range(128)]


NAMES_AND_KINDS = [
    ("int8_g32", "Q8_0"), ("int8_g128", "Q8_0"), ("int4_g32", "Q4_0"), ("int4_g128", "Q4_0"), ("int4", "Q4_0"),
    ("ternary", "TQ2_0"), ("binary_g128", "Q1_0"), ("binary", "Q1_0"),
]  # fmt: skip


def pack_rows(name: str, kind: str) -> tuple[torch.Tensor, torch.Tensor, BlockType]:
    """Return rounded weights `[3, 512]`, their blocks in GGUF's type `kind`, and that type."""
    form = get_weight_format(name)
    assert isinstance(form, CodedWeightFormat)
    packed = form.pack(torch.randn(3, 512, generator=torch.Generator().manual_seed(0)))
    block = find_block_type(form, 512)
    assert block.name == kind
    data = encode_blocks(form, packed, block)
    assert data.shape == (3, 512 // block.weights * block.nbytes)
    return form.unpack(packed), data, block


@pytest.mark.parametrize(("name", "kind"), NAMES_AND_KINDS)
def test_blocks_have_the_numbers_of_the_format(name: str, kind: str) -> None:
    weights, data, block = pack_rows(name, kind)
    rows = data.numpy().reshape(3, -1, block.nbytes)
    found = torch.tensor([[weight for one in row for weight in read_block(one, kind)] for row in rows])
    assert torch.equal(found, weights)
    assert torch.equal(get_weight_format(block.format).unpack(decode_blocks(data, block)), weights)


def test_damaged_blocks_and_formats_without_a_type_are_refused() -> None:
    with pytest.raises(ModelError, match="not rows of blocks of 34 of GGUF's Q8_0"):
        decode_blocks(torch.zeros(2, 35, dtype=torch.uint8), BLOCK_TYPES["Q8_0"])
    with pytest.raises(ModelError, match="TQ2_0 is 3, which is not a ternary value"):
        decode_blocks(torch.full((1, 66), 255, dtype=torch.uint8), BLOCK_TYPES["TQ2_0"])
    for name in ("int3_g64", "int4_g32_zp", "int2", "ternary_g128", "binary_g32", "int8", "fp8"):
        with pytest.raises(ModelError, match=f"no GGUF type has the numbers of format '{name}'"):
            find_block_type(get_weight_format(name), 256)
    with pytest.raises(ModelError, match="100 input features do not divide into blocks of 32"):
        find_block_type(get_weight_format("int8_g32"), 100)


def test_models_of_pruned_heads_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", PRUNING_ENTRY: {"heads": 6}}))
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(gguf_file, "import_gguf", lambda: None)  # the package need not be installed
    with pytest.raises(ModelError, match="has windlass_pruning in its config.json: .* not written to GGUF"):
        gguf_file.write_gguf(tmp_path, tmp_path / "out.gguf")


SETTINGS = {
    "num_attention_heads": 2, "hidden_size": 8, "max_position_embeddings": 32, "num_hidden_layers": 1,
    "intermediate_size": 8, "rms_norm_eps": 1e-5, "vocab_size": 8,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "activation"), [("llama", "gelu"), ("qwen3", "relu"), ("gemma", "silu")])
def test_activations_that_no_reader_computes_are_refused(
    kind: str, activation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**SETTINGS, "model_type": kind, "hidden_act": activation}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(gguf_file, "import_gguf", MagicMock)
    with pytest.raises(ModelError, match=f"hidden_act is '{activation}' .* models of type '{kind}'"):
        gguf_file.write_gguf(tmp_path, tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, True),
        ({"model_type": "mistral", "sliding_window": 32}, False),
        ({"model_type": "mistral", "sliding_window": None}, False),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False}, False),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True}, True),
    ],
)
def test_a_window_that_the_file_does_not_have_is_reported(
    settings: dict[str, Any],
    warns: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SETTINGS, "hidden_act": "silu", **settings}))
    save_file({"unknown.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(gguf_file, "import_gguf", MagicMock)
    with pytest.raises(ModelError, match="'unknown.weight' has no name in GGUF"):
        gguf_file.write_gguf(tmp_path, tmp_path / "out.gguf")
    assert ("sliding_window is 16 in config.json" in caplog.text) == warns


def test_gguf_files_are_opened_as_models(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")  # damaged; the package need not be installed
    for load in (load_model, load_tokenizer_of, load_packed_model):
        with pytest.raises(ModelError, match="x.gguf cannot be read as GGUF|GGUF files need the package gguf"):
            load(path)
    with pytest.raises(ModelError, match="GGUF file, whose weights are quantized already; leave weights='int4' out"):
        windlass.from_pretrained(AutoModelForCausalLM, path, weights="int4")


def test_tokenizers_name_their_splitting() -> None:
    split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}# ?[^\s\p{L}\p{N}]+[\r\n]*|"
    split += r"\s*[\r\n]+|\s+(?!\S)|\s+"
    bytes_alone = {"type": "ByteLevel", "use_regex": False}

    def of(expression: str) -> dict[str, object]:
        steps = [{"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated"}, bytes_alone]
        return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}

    assert find_splitting({"pre_tokenizer": {"type": "ByteLevel", "use_regex": True}}) == "gpt-2"
    assert find_splitting(of(split.replace("#", "|"))) == "qwen2"
    assert find_splitting(of(split.replace("#", "{1,3}|"))) == "llama-bpe"
    assert find_splitting(of(r"\s+")) is None and find_splitting({}) is None
    assert find_splitting({"pre_tokenizer": bytes_alone}) is None
