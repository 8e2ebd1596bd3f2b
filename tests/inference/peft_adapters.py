"""Adapters saved by peft, and comparison of answers with peft's own models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from tests.inference.greedy_reference import assert_greedy
from windlass.inference.outputs import RequestOutput

ATTENTION = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "mixtral": ["q_proj", "o_proj"], "bloom": ["dense"]}
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 9},
    "root": {"r": 3, "lora_alpha": 5, "use_rslora": True},
    "patterns": {"r": 2, "rank_pattern": {"0\\..*": 5}, "alpha_pattern": {"1\\..*": 11}},
}


def write_adapter(model: Any, directory: Path, seed: int = 0, *, std: float = 0.5, **config: Any) -> Path:
    """Save an adapter whose products are large enough to change tokens."""
    from peft import LoraConfig, get_peft_model  # not at the top: an import takes seconds, wherever tests are collected

    torch.manual_seed(seed)
    tuned: Any = get_peft_model(copy.deepcopy(model), LoraConfig(init_lora_weights=False, **config))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=std)
    tuned.save_pretrained(directory, save_embedding_layers=False)
    return directory


def reference(model: Any, directory: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(copy.deepcopy(model), directory).eval()


def write_three(model: Any, name: str, folder: Path) -> dict[str, Path]:
    every = {"llama": "all-linear", "gpt2": ["c_attn", "c_proj", "c_fc"]}.get(name, ATTENTION[name])
    found = {}
    for seed, (adapter, config) in enumerate(ADAPTERS.items()):
        targets = every if adapter == "patterns" else ATTENTION[name]
        config = {**config, "target_modules": targets, "fan_in_fan_out": name == "gpt2"}
        found[adapter] = write_adapter(model, folder / adapter, seed, **config)
    return found


def assert_adapters(model: Any, outputs: list[RequestOutput], directories: dict[str, Path]) -> None:
    plain = [output.outputs[0].token_ids for output in outputs if output.lora_name is None]
    assert plain
    assert_greedy(model, [output for output in outputs if output.lora_name is None])
    for adapter, directory in directories.items():
        chosen = [output for output in outputs if output.lora_name == adapter]
        assert chosen
        assert_greedy(reference(model, directory), chosen)
