"""Tiny mixture-of-experts models of transformers, with random weights large enough for distinct routing scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 40
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class HfExperts:
    """Model family: its configuration class and model class, and settings of a small model in addition to `_SIZES`."""

    config: str
    model: str
    more: tuple[tuple[str, Any], ...]

    def build(self, **changed: Any) -> nn.Module:
        """Return the model, with the same random values at each call."""
        import transformers

        words = {**_SIZES, **dict(self.more), **changed}
        config = getattr(transformers, self.config)(**words)
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, self.model)(config)
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    # smaller values would make routing scores nearly equal and gradients nearly zero
                    parameter.normal_(std=0.25)
                elif "norm" not in name:
                    parameter.normal_(std=0.1)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(std=0.05)
        return model


def _family(name: str, **more: Any) -> HfExperts:
    return HfExperts(f"{name}Config", f"{name}ForCausalLM", tuple(more.items()))


FAMILIES: dict[str, HfExperts] = {
    "mixtral": _family(
        "Mixtral", num_local_experts=4, num_experts_per_tok=2, intermediate_size=24, output_router_logits=True
    ),
    "qwen2_moe": _family(
        "Qwen2Moe",
        num_experts=6,
        num_experts_per_tok=3,
        intermediate_size=24,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
    ),
    "qwen3_moe": _family(
        "Qwen3Moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12, head_dim=4, norm_topk_prob=True
    ),
    "deepseek_v2": _family(
        "DeepseekV2",
        num_key_value_heads=4,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=0,
        intermediate_size=24,
        moe_intermediate_size=12,
        topk_method="group_limited_greedy",
        n_group=3,
        topk_group=2,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    ),
    "deepseek_v3": _family(
        "DeepseekV3",
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        first_k_dense_replace=0,
        intermediate_size=24,
        moe_intermediate_size=12,
        n_group=4,
        topk_group=2,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    ),
    "olmoe": _family("Olmoe", num_experts=5, num_experts_per_tok=2, intermediate_size=12),
    "granite": _family("GraniteMoe", num_local_experts=4, num_experts_per_tok=2, intermediate_size=12),
    "gpt_oss": _family(
        "GptOss",
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=12,
        head_dim=4,
        layer_types=["full_attention", "full_attention"],
    ),
    "llama4": HfExperts(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        (
            ("num_local_experts", 4),
            ("num_experts_per_tok", 2),
            ("intermediate_size", 12),
            ("intermediate_size_mlp", 24),
            ("interleave_moe_layer_step", 1),
            ("head_dim", 4),
            ("attention_chunk_size", 32),
        ),
    ),
    "dbrx": HfExperts(
        "DbrxConfig",
        "DbrxForCausalLM",
        (
            ("d_model", 16),
            ("n_heads", 4),
            ("n_layers", 2),
            ("max_seq_len", 32),
            ("attn_config", {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}),
            ("ffn_config", {"ffn_hidden_size": 12, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16}),
        ),
    ),
}


def language(rank: int, samples: int = 2, length: int = 7) -> dict[str, Tensor]:
    """Return the ids of one rank, and the same ids as labels."""
    ids = torch.randint(1, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(100 + rank))
    return {"input_ids": ids, "labels": ids.clone()}
