"""DeepSpeed configurations as clients write them, with `auto` for every value that a client can fill in."""

from __future__ import annotations

from typing import Any

_AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},  # without this section transformers 4.57 casts batches, e.g. DPO's, to fp16
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
}


def config(stage: int, zero: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    """Return a configuration for transformers' Trainer: a stage, other keys of its section, and other sections."""
    section = {"stage": stage, "reduce_bucket_size": "auto", **(zero or {})}
    if stage == 3:
        section |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    return {**_AUTO, "zero_optimization": section, **others}
