"""Tiny models of the classes in transformers' MODEL_FOR_CAUSAL_LM_MAPPING, by rules for the fields of configurations.

A rule gives a field the same small value in every class that has it. Windows, chunks and numbers of selected tokens are
shorter than the prompts of tests, so that they take effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

VOCABULARY = 97

_HEADS = 4
_LAYERS = 4
_HIDDEN = 32
_RULES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "lru_width", "embedding_size"), _HIDDEN),
    **dict.fromkeys(("word_embed_proj_dim", "input_embedding_size", "output_embedding_size"), _HIDDEN),
    **dict.fromkeys(("attention_hidden_size", "backbone_hidden_size"), _HIDDEN),
    **dict.fromkeys(("num_hidden_layers",), _LAYERS),
    **dict.fromkeys(("num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads"), _HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "swa_num_attention_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("n_inner", "dff", "d_inner", "dim_ff", "dense_intermediate_size"), 48),
    **dict.fromkeys(("prefix_dense_intermediate_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("expert_ffn_hidden_size", "router_hidden_size", "block_multiple_of"), 16),
    **dict.fromkeys(("head_dim", "dim_head", "d_head", "kv_channels", "swa_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank", "o_lora_rank", "index_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "indexer_head_dim"), 8),
    **dict.fromkeys(("laurel_rank", "hidden_size_per_layer_input", "ple_embed_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "attention_chunk_size", "floor_scale", "block_size"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_dense_layers", "n_groups", "mamba_n_groups", "indexer_kv_heads", "split_ngram_parts"), 1),
    **dict.fromkeys(("expert_layer_offset", "attn_layer_offset", "make_ngram_vocab_size_divisible_by"), 1),
    **dict.fromkeys(("expert_layer_period", "attn_layer_period", "hc_mult", "o_groups", "heads_per_ngram"), 2),
    **dict.fromkeys(("zero_expert_num", "linear_num_key_heads", "max_window_layers"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "rotary_dim", "mamba_dt_rank", "time_step_rank"), 4),
    **dict.fromkeys(("adapter_rank", "gated_norm_rank", "hc_lowrank", "prompt_length"), 4),
    **dict.fromkeys(("index_n_heads", "indexer_n_heads"), 16),  # with fewer heads, many scores are 0 and tie
    **dict.fromkeys(("sliding_window", "attention_window_size", "sliding_window_size"), 7),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 128),
    **dict.fromkeys(("context_length", "original_max_position_embeddings"), 128),
    **dict.fromkeys(("num_mtp_layers", "num_nextn_predict_layers"), 0),
    **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim"), 8),
    **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size"), VOCABULARY),
    **{
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "sep_token_id": 3,
        "cls_token_id": 3,
        "mask_token_id": 4,
    },
    **{"index_topk": 6, "keep_window_size": 10, "local_attention": 14, "q_lora_rank": 12, "mamba_d_ssm": 64},
    **{"global_head_dim": 16, "ngram_vocab_size_base": 64, "qk_head_dim": 16, "use_mamba_kernels": False},
}

_OTHER_PARTS: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "embed_dim", "out_hidden_size", "d_model", "ffn_dim"), _HIDDEN
    ),
    **dict.fromkeys(("encoder_ffn_dim", "vision_output_dim", "projector_input_dim", "projector_output_dim"), _HIDDEN),
    **dict.fromkeys(("base_channels", "mlp_dim", "mm_embed_dim", "output_proj_dims", "audio_embed_dim"), _HIDDEN),
    **dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"), _HIDDEN),
    **dict.fromkeys(("adapter_out_dim",), _HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers", "encoder_layers", "num_blocks"), 1),
    **dict.fromkeys(("num_res_blocks", "num_global_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "attention_heads", "num_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("image_size", "vocab_size", "output_channels", "codebook_size"), 16),
    **{"patch_size": 8, "num_position_embeddings": 4, "max_source_positions": 50, "global_attn_indexes": [0]},
    "channel_multiplier": [1, 1],
}
"""Rules for encoders of images and audio, which get no input."""

_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_HYBRID = ["linear_attention", "full_attention"] * 2
_WITH_ATTENTION = ["linear_attention", "hybrid"] * 2
_LATENT = {"num_key_value_heads": _HEADS}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_EXPERT_HASHES = {"layer_types": ["linear_attention", "indexed_attention"] * 2, "indexer_budget": 8}
_QWEN4 = {**_EXPERT_HASHES, "indexer_compress_ratio": 2}
_BYTES = {"vocab_size": VOCABULARY, "hidden_size_global": _HIDDEN}

_BY_TYPE: dict[str, dict[str, Any]] = {
    **{
        name: {"is_decoder": True}
        for name in (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
            *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl"),
            "xmod",
        )
    },
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "minicpm3", "youtu"), _LATENT),
    "bailing_hybrid": {**_LATENT, "layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        **{"encoder_hash_byte_group_vocab": 50, "encoder_hash_byte_group_size": [3, 4]},
        **{"local_attention_window_len": 7, "encoder_config": _BYTES, "patcher_config": {"vocab_size": VOCABULARY}},
        "decoder_config": {**_BYTES, "num_hidden_layers": 2},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**_ROPE, "mrope_section": [2, 1, 1]}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {**_LATENT, "topk_method": "greedy", "n_group": None, "topk_group": None},
    "deepseek_v4": {
        **{"num_key_value_heads": 1, "head_dim": 16, "mlp_layer_types": None},
        "layer_types": [
            *("heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"),
            "heavily_compressed_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "gemma3n_text": {
        **{"num_kv_shared_layers": 2, "layer_types": _ALTERNATING},
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {"num_kv_shared_layers": 2, "layer_types": _ALTERNATING},
    "glm_moe_dsa": {**_LATENT, "indexer_types": ["full", "shared"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 7},
    "granitemoehybrid": {"layer_types": _HYBRID, "position_embedding_type": "rope"},
    "hrm_text": {"num_hidden_layers": 1, "H_cycles": 2, "L_cycles": 2},
    "hy_v4": {**_LATENT, "indexer_types": ["full", "shared"] * 2},
    "kimi_linear": {**_LATENT, "q_lora_rank": None},
    "laguna": {"layer_types": ["full_attention", "sliding_attention"] * 2, "num_attention_heads_per_layer": [4, 8] * 2},
    **dict.fromkeys(("lfm2", "lfm2_moe"), {"layer_types": ["conv", "full_attention"] * 2}),
    "llama4": {"text_config": {"num_experts_per_tok": 1}},
    "llama4_text": {"num_experts_per_tok": 1},
    "longcat_flash": _LATENT,
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "mellum": {"layer_types": _ALTERNATING, "mlp_layer_types": ["dense", "sparse"] * 2},
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] * 4, "mlp_layer_types": ["dense", "sparse"] * 2},
    "ministral3": {
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8},
            **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1},
        }
    },
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "olmo_hybrid": {"layer_types": _HYBRID, "num_key_value_heads": _HEADS},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "num_key_value_heads": 1},
    "reformer": {
        **{"is_decoder": True, "attn_layers": ["local", "lsh"], "axial_pos_shape": (16, 16)},
        **{"axial_pos_embds_dim": (16, 16), "attention_head_size": 8, "feed_forward_size": 48, "num_buckets": 4},
        **{"hash_seed": 0, "max_position_embeddings": 256, "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8},
    },
    "xlm": {"causal": True},
    "xlstm": {"hidden_size": 128, "num_blocks": 2, "num_hidden_layers": 2},
    "zamba": {
        **{"layers_block_type": _WITH_ATTENTION, "attention_hidden_size": 64, "attention_head_dim": 16},
        **{"num_key_value_heads": _HEADS, "n_mamba_heads": 2},
    },
    "zamba2": {"layers_block_type": _WITH_ATTENTION, "num_key_value_heads": _HEADS},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
}

NOT_STANDALONE = {
    "dots3_note": "its text part needs values for each layer",
    "dots3_note_text": "the sizes of its sliding layers are fixed",
    "gemma3n": "its vision part needs timm",
    "gemma4_assistant": "it computes with keys and values of another model",
    "gemma4_unified_assistant": "it computes with keys and values of another model",
    "musicgen": "it generates several codebooks in parallel",
    "musicgen_melody": "it generates several codebooks in parallel",
}
"""Model types without a tiny text model, and the reasons."""


def make_tiny_model(model_type: str) -> nn.Module:
    """Build the causal model of this type with random weights, in eval mode."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = _make_config(CONFIG_MAPPING[model_type], _BY_TYPE.get(model_type, {}))
    if model_type == "xmod":
        config.default_language = "en_XX"
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.dim() > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def _make_config(kind: Any, changes: Mapping[str, Any]) -> Any:
    default = _default(kind)
    parts = getattr(kind, "sub_configs", None) or {}
    values = _make_values(kind, default, {name: value for name, value in changes.items() if name not in parts})
    for name in parts:
        part = getattr(default, name, None)
        if part is not None:
            rules = _RULES if name == "text_config" else _OTHER_PARTS
            inner = _make_values(type(part), part, changes.get(name, {}), rules)
            values[name] = {**inner, "model_type": part.model_type}
    return kind(**values)


def _make_values(
    kind: Any, default: Any, changes: Mapping[str, Any], rules: Mapping[str, Any] = _RULES
) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in rules.items() if name in known}
    values |= {name: 0.0 for name in known if "drop" in name and isinstance(getattr(default, name, None), float)}
    if rules is _RULES:
        values |= _cycle_layer_types(default, known, changes.get("num_hidden_layers", _LAYERS))
    return values | dict(changes)


def _cycle_layer_types(default: Any, known: set[str], layers: int) -> dict[str, list[str]]:
    """Return the lists of layer types for `layers` layers, which repeat the types in the default configuration."""
    found = {}
    orders: dict[str, Callable[[list[str]], list[str]]] = {"layer_types": list, "mlp_layer_types": sorted}
    for name, order in orders.items():  # `sorted` puts dense layers first
        types = getattr(default, name, None)
        if name in known and isinstance(types, (list, tuple)):
            kinds = list(dict.fromkeys(types))
            found[name] = order([kinds[layer % len(kinds)] for layer in range(layers)])
    return found


def _default(kind: Any) -> Any:
    try:
        return kind()
    except Exception:  # some configurations have no valid defaults
        return None
