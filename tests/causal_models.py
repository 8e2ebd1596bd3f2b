"""Tiny causal language models of transformers with random weights, with and without a tensor-parallel plan."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY = 41  # prime, so that no number of ranks divides it


def build(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """Return the model `name` with `changes` to its configuration. Noise makes its biases and norms random too."""
    torch.manual_seed(seed)
    model = CAUSAL[name](**changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_meta:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def model_of(kind: str, config: str | None = None, **values: Any) -> nn.Module:
    """Build transformers' class `kind` without a cache. By default `config` is derived from the name of the class."""
    import transformers

    named = config or re.sub("ForCausalLM|LMHeadModel|ForConditionalGeneration", "Config", kind)
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, named)(**{"use_cache": False, **values}))
    return model


_ROTARY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_SIZED = {**_ROTARY, "head_dim": 8}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}
_OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
_QUIET = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_LATENT = {
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def _family(kind: str, known: dict[str, Any], config: str | None = None) -> Callable[..., nn.Module]:
    fixed = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **known}
    return lambda **changes: model_of(kind, config, **{**fixed, **changes})


CAUSAL: dict[str, Callable[..., nn.Module]] = {
    # models with a tensor-parallel plan in transformers
    "llama": _family("LlamaForCausalLM", _ROTARY),
    "qwen3": _family("Qwen3ForCausalLM", {**_SIZED, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "phi3": _family("Phi3ForCausalLM", _ROTARY),  # fused queries, keys and values; fused gate and up
    "glm": _family("GlmForCausalLM", _SIZED),
    "gemma2": _family("Gemma2ForCausalLM", _SIZED),  # scaled embeddings, capped logits
    "gemma3": _family("Gemma3ForCausalLM", _SIZED, "Gemma3TextConfig"),
    "cohere": _family("CohereForCausalLM", {**_ROTARY, "use_qk_norm": True}),  # norms with weights for each head
    "olmo2": _family("Olmo2ForCausalLM", _ROTARY),  # query and key norms over all heads
    "gpt_neox": _family("GPTNeoXForCausalLM", {**_ROTARY, "num_key_value_heads": 4}),  # QKV fused head by head
    "mixtral": _family("MixtralForCausalLM", {**_ROTARY, **_EXPERTS, "output_router_logits": True}),
    "granitemoe": _family("GraniteMoeForCausalLM", {**_ROTARY, **_EXPERTS}),
    "qwen2_moe": _family(
        "Qwen2MoeForCausalLM",
        {
            **_ROTARY,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [0],
        },
    ),
    "llama4": _family(
        "Llama4ForCausalLM",
        {**_SIZED, **_EXPERTS, "num_experts_per_tok": 1, "intermediate_size_mlp": 24},
        "Llama4TextConfig",
    ),
    "deepseek_v2": _family(
        "DeepseekV2ForCausalLM",
        {**_ROTARY, **_LATENT, "topk_method": "greedy", "n_group": None, "topk_group": None},
    ),
    "deepseek_v3": _family("DeepseekV3ForCausalLM", {**_ROTARY, **_LATENT, "n_group": 1, "topk_group": 1}),
    "qwen3_next": _family(
        "Qwen3NextForCausalLM",
        {
            **_SIZED,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    # models without a tensor-parallel plan in transformers: windlass traces their graph
    "gpt2": _family("GPT2LMHeadModel", {**_OLD, **_QUIET, "n_embd": 24, "n_head": 3}),  # Conv1D layers; tied head
    "opt": _family("OPTForCausalLM", {**_ROTARY, "ffn_dim": 40, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "bert": _family(
        "BertLMHeadModel",
        {**_ROTARY, "is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "bloom": _family("BloomForCausalLM", {**_OLD, "hidden_size": 32}),  # an attention bias for each head (ALiBi)
    "mpt": _family("MptForCausalLM", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32}),
    "falcon": _family("FalconForCausalLM", {**_ROTARY, "num_kv_heads": 4}),  # one key head, fused with all queries
    "gpt_bigcode": _family("GPTBigCodeForCausalLM", {**_OLD, **_QUIET}),
    "gptj": _family("GPTJForCausalLM", {**_OLD, **_QUIET, "rotary_dim": 4}),
    "gpt_neo": _family(
        "GPTNeoForCausalLM",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 32,
            "resid_dropout": 0.0,
            "embed_dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "gpt_oss": _family("GptOssForCausalLM", {**_SIZED, **_EXPERTS}),  # attention sinks, and experts with biases
}


def language(seed: int, samples: int = 2, length: int = 7) -> dict[str, torch.Tensor]:
    """Return random ids `[samples, length]`, and labels equal to the ids; the first three of sample 0 are ignored."""
    ids = torch.randint(3, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def build_longer(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """Build a model in eval mode for sequences of up to 96 tokens."""
    key = {"gpt2": "n_positions", "gptj": "n_positions", "gpt_bigcode": "n_positions", "mpt": "max_seq_len"}
    return build(name, seed, **{key.get(name, "max_position_embeddings"): 96, **changes}).eval()
