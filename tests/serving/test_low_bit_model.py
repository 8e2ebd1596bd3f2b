"""Test of a 2-bit model from its compression to HTTP answers: its tokens are those of the weights in its file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.serving.harness import client_of
from tests.serving.tiny_model import write_tiny_model
from windlass.compress.post_training import RoundingOptions, compress_directory
from windlass.inference.async_engine import AsyncLLMEngine
from windlass.inference.llm import LLM
from windlass.inference.sampling_params import SamplingParams

PROMPTS = ["hello", "a longer prompt with several words", "ünïcödé"]
OPTIONS: dict[str, Any] = {"activations": "float", "max_sequences": 4, "kv_cache_tokens": 1024}
TOKENS = 12


def numbers_of_file(tensors: dict[str, Tensor], layer: str) -> Tensor:
    """Return a layer's float matrix from its two-bit codes, 16 in a word, and a scale for each 64 input features."""
    words, scale = tensors[f"{layer}.weight_packed"], tensors[f"{layer}.weight_scale"].float()
    codes = torch.stack([(words >> (2 * place)) & 3 for place in range(16)], 2).flatten(1)
    rows, columns = tensors[f"{layer}.weight_shape"].tolist()
    groups = (codes[:, :columns].float() - 2).view(rows, -1, 64) * scale.unsqueeze(2)
    return groups.view(rows, columns)


def reference(wide: Path, packed: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(wide)
    tensors = load_file(packed / "model.safetensors")
    for name, module in model.named_modules():
        if type(module) is nn.Linear and f"{name}.weight_packed" in tensors:
            module.weight.data.copy_(numbers_of_file(tensors, name))
    return model


def completed(engine: AsyncLLMEngine) -> list[list[int]]:
    asyncio.run(engine.start())
    try:
        client: Any = client_of(engine)  # type: ignore[arg-type]
        body = {"model": "m", "prompt": PROMPTS, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
        answer = client.post("/v1/completions", json=body).json()
    finally:
        asyncio.run(engine.shutdown())
    return [choice["token_ids"] for choice in answer["choices"]]


def test_two_bits_are_served_with_the_numbers_of_the_file(tmp_path: Path) -> None:
    wide = write_tiny_model(tmp_path / "wide")
    report, _ = compress_directory(wide, tmp_path / "packed", "int2_g64", RoundingOptions("hqq"))
    assert set(report.layers.values()) == {"int2_g64"} and report.packed_before > 12 * report.packed_after
    model = reference(wide, tmp_path / "packed")
    with LLM(tmp_path / "packed", **OPTIONS) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=TOKENS))
        tokenizer = llm.tokenizer
    found = [list(output.outputs[0].token_ids) for output in outputs]
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([tokenizer(prompt).input_ids])
        expected = model.generate(ids, do_sample=False, max_new_tokens=TOKENS, pad_token_id=0)[
            0, ids.shape[1] :
        ].tolist()
        assert tokens == expected, prompt
    engine = AsyncLLMEngine.from_model(tmp_path / "packed", **OPTIONS)
    assert completed(engine) == found
