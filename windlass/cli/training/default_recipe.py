"""Built-in models (a small Llama and a small Mixtral) and default configuration, for training on two CPU cores."""

from __future__ import annotations

from typing import Any

TINY_MODEL = "tiny"
TINY_MOE_MODEL = "tiny-moe"
BUILT_IN_MODELS = (TINY_MODEL, TINY_MOE_MODEL)
DEFAULT_SEQ_LEN = 128
DEFAULT_VOCAB_SIZE = 4096
DEFAULT_STEPS = 900


def tiny_llama_config(vocab_size: int, seq_len: int) -> dict[str, Any]:
    """Return the arguments of a `transformers.LlamaConfig` with about 2.6 million parameters at the default
    vocabulary size."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "max_position_embeddings": max(1024, seq_len),
        "tie_word_embeddings": True,
    }


def tiny_mixtral_config(vocab_size: int, seq_len: int) -> dict[str, Any]:
    """Return the arguments of a `transformers.MixtralConfig`: `tiny_llama_config` with 4 experts of half the
    feed-forward size, 2 per token.
    """
    tiny = {**tiny_llama_config(vocab_size, seq_len), "num_key_value_heads": 3, "intermediate_size": 256}
    return {**tiny, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}


def default_config() -> dict[str, Any]:
    """Return the ds_config of `windlass train` without --config, with "auto" values; see `fill_auto`."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 2},
        "optimizer": default_optimizer(),
        "scheduler": default_scheduler(),
        "gradient_clipping": 1.0,
    }


def default_optimizer() -> dict[str, Any]:
    return {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "weight_decay": 0.1}}


def default_scheduler() -> dict[str, Any]:
    return {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}


def default_learning_rate(model: str) -> float:
    """Return the default learning rate: high for the built-in models, which are untrained; low for others."""
    return 3e-3 if model in BUILT_IN_MODELS else 3e-4


def fill_auto(config: dict[str, Any], steps: int, lr: float) -> dict[str, Any]:
    """Return a copy of `config` in which the "auto" values of optimizer and scheduler are set for this run."""
    values = {
        "optimizer": {"lr": lr},
        "scheduler": {
            "total_num_steps": steps,
            "warmup_num_steps": max(2, steps // 20),
            "warmup_min_lr": 0.0,
            "warmup_max_lr": lr,
        },
    }
    filled = dict(config)
    for name, known in values.items():
        section = filled.get(name)
        if not isinstance(section, dict) or not isinstance(section.get("params"), dict):
            continue
        params = {
            key: known[key] if value == "auto" and key in known else value for key, value in section["params"].items()
        }
        filled[name] = section | {"params": params}
    return filled
