"""Tests that each rule across sections refuses its pair of keys, and no valid configuration."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.config import validate_config
from windlass.config.config_problems import ProblemKind
from windlass.config.contradictions import CONTRADICTION_RULES

WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}
BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("fp16.enabled", {"fp16": {"enabled": True}, "bf16": {"enabled": True}}),
    ("fp16.enabled", {"fp16": {"enabled": True}, "torch_autocast": {"enabled": True}}),
    ("bf16.enabled", {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "fp16"}}),
    ("data_types.param_dtype", {"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp32"}}),
    ("gradient_predivide_factor", {"prescale_gradients": True, "gradient_predivide_factor": 2.0}),
    ("data_types.buffer_dtype", {"data_types": {"buffer_dtype": "bf16"}}),
    ("bf16.bf16_optimizer_states", {"bf16": {"enabled": True, "bf16_optimizer_states": True}}),
    (
        "data_types.grad_accum_dtype",
        {
            "fp16": {"enabled": True, "fp16_master_weights_and_grads": True},
            "data_types": {"grad_accum_dtype": "fp32"},
        },
    ),
    ("managed_gradient_accumulation", {"managed_gradient_accumulation": False, "parallel": {"pp": 2}}),
    ("zero_optimization.offload_param", {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}),
    (
        "zero_optimization.offload_param.nvme_path",
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
    ),
    (
        "zero_optimization.offload_param.nvme_path",
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": ""}}},
    ),
    (
        "zero_optimization.cpu_offload",
        {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
    ),
    (
        "zero_optimization.offload_optimizer.delayed_update",
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"delayed_update": True}}},
    ),
    (
        "zero_optimization.offload_optimizer.delayed_update",
        {
            "zero_optimization": {
                "stage": 1,
                "offload_optimizer": {"device": "cpu", "delayed_update": True, "ratio": 0.5},
            }
        },
    ),
    (
        "zero_optimization.offload_optimizer.delayed_update_start",
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "delayed_update_start": 3}}},
    ),
    ("zero_optimization.mics_shard_size", {"zero_optimization": {"mics_shard_size": 2, "zero_hpz_partition_size": 2}}),
    (
        "zero_optimization.compute_grad_norm",
        {"gradient_clipping": 1.0, "zero_optimization": {"compute_grad_norm": False}},
    ),
    ("scheduler.params.warmup_max_lr", {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "scheduler": WARMUP}),
    (
        "scheduler.params.warmup_min_lr",
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1, "warmup_max_lr": 0.5}}},
    ),
    (
        "activation_checkpointing.contiguous_memory_optimization",
        {"activation_checkpointing": {"contiguous_memory_optimization": True}},
    ),
    (
        "parallel.dp_replicate",
        {"parallel": {"dp_replicate": 2}, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
    ),
    ("optimizer.type", {"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 3}}),
    ("zero_optimization.zero_quantized_weights", {"zero_optimization": {"stage": 2, "zero_quantized_weights": True}}),
    ("pipeline.stages", {"parallel": {"pp": 2}, "pipeline": {"stages": 4}}),
    ("tensor_parallel.autotp_size", {"parallel": {"tp": 2}, "tensor_parallel": {"autotp_size": 4}}),
    ("tensor_parallel.autotp_size", {"parallel": {"tp": 1}, "tensor_parallel": {"autotp_size": 4}}),
    ("tensor_parallel.tp.tp_size", {"tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 2}}}),
    ("offload", {"offload": "auto"}),
    ("offload", {"offload": {}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
    ("offload", {"offload": "auto", "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}),
    ("sequence_parallel_size", {"parallel": {"sp": 2}, "sequence_parallel_size": 1}),
    ("expert_parallel.autoep_size", {"parallel": {"ep": 2}, "expert_parallel": {"enabled": True}}),
    ("parallel.ulysses_degree", {"parallel": {"sp": 4, "sp_mode": "ulysses+ring", "ulysses_degree": 3}}),
    ("parallel.ulysses_degree", {"parallel": {"sp": 4, "ulysses_degree": 2}}),
    ("parallel.activation_tier", {"train_batch_size": 8, "parallel": {"activation_tier": "cpu"}}),
    ("parallel.activation_tier", {"parallel": {"recompute": True, "activation_tier": "nvme"}}),
    ("parallel.tiled_mlp", {"train_batch_size": 8, "parallel": {"tp_sequence_norms": True, "tiled_mlp": True}}),
    ("checkpoint.format", {"train_batch_size": 8, "parallel": {"tp": 2}, "checkpoint": {"format": "deepspeed"}}),
    ("checkpoint.format", {"optimizer": {"type": "PowerSGD"}, "checkpoint": {"format": "deepspeed"}}),
    ("optimizer.params.fragments", {"optimizer": {"type": "DiLoCo", "params": {"inner_steps": 4, "fragments": 5}}}),
    ("optimizer.params.overlap_steps", {"optimizer": {"type": "DiLoCo", "params": {"overlap_steps": 32}}}),
    ("optimizer.params.factor_min", {"optimizer": {"type": "OneBitLamb", "params": {"factor_min": 5.0}}}),
    (
        "optimizer.params.nesterov",
        {"optimizer": {"type": "PowerSGD", "params": {"nesterov": True, "momentum": 0.0}}},
    ),
    ("parallel.tp_sequence_norms", {"parallel": {"tp_sequence_norms": True, "tp_overlap_chunks": 2}}),
    (
        "parallel.tp_sequence_norms",
        {"parallel": {"tp_sequence_norms": True}, "tensor_parallel": {"tp_overlap_comm": True}},
    ),
    ("pipeline.virtual_stages", {"pipeline": {"schedule": "interleaved", "virtual_stages": 1}}),
    ("pipeline.virtual_stages", {"pipeline": {"virtual_stages": 2}}),
    ("pipeline.micro_batches", {"gradient_accumulation_steps": 2, "pipeline": {"micro_batches": 4}}),
    ("watchdog.timeout_s", {"watchdog": {"report_after_s": 60, "timeout_s": 30}}),
    (
        "compression_training.sparse_pruning.different_groups",
        {"compression_training": {"sparse_pruning": {"shared_parameters": {"enabled": True}}}},
    ),
    (
        "weight_quantization.post_init_quant.layers.num_bits",
        {"weight_quantization": {"post_init_quant": {"layers": {"group_size": 64}}}},
    ),
    ("train_batch_size", {"train_batch_size": 8, "elasticity": {"enabled": True}}),
    ("pipeline.micro_batches", {"pipeline": {"micro_batches": 4}, "elasticity": {"enabled": True}}),
]

FINE: list[dict[str, Any]] = [
    {},
    {"bf16": {"enabled": True}, "data_types": {"param_dtype": "bf16"}},
    {"prescale_gradients": True, "gradient_predivide_factor": 1.0},
    {"zero_optimization": {"stage": 2, "offload_param": {"device": "none"}, "stage3_max_live_parameters": 5}},
    {"zero_optimization": {"compute_grad_norm": False}},
    {"zero_optimization": {"compute_grad_norm": False}, "gradient_clipping": 0},
    {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "scheduler": WARMUP},
    {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "scheduler": WARMUP},
    {"optimizer": {"type": "AdamW"}, "scheduler": WARMUP},
    {"offload": {"device_memory": "12GB", "host_memory": 10**9}, "zero_optimization": {"stage": 1}},
    {"watchdog": {"report_after_s": 30, "timeout_s": 30}},
    {"parallel": {"dp_replicate": 2}, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1}},
    {"parallel": {"pp": 2, "tp": 4}, "pipeline": {"stages": 2}, "tensor_parallel": {"tp": {"tp_size": 4}}},
    {"parallel": {"tp": 4}, "tensor_parallel": {"autotp_size": 0, "tp": {"tp_size": 1}}},
    {"tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 1}}},
    {"parallel": {"ep": 2}, "expert_parallel": {"autoep_size": 8}},
    {"parallel": {"sp": 4, "sp_mode": "ulysses+ring", "ulysses_degree": 2}},
    {"sequence_parallel_size": 2, "parallel": {"sp_mode": "ring"}},
    {"parallel": {"sp": 4, "sp_mode": "ulysses+ring"}},
    {"pipeline": {"schedule": "interleaved", "virtual_stages": 3}},
    {"pipeline": {"schedule": "zero-bubble", "virtual_stages": 2}},
    {"gradient_accumulation_steps": 4, "pipeline": {"micro_batches": 4}},
    {"train_batch_size": 8, "elasticity": {"enabled": True, "ignore_non_elastic_batch_info": True}},
]


@pytest.mark.parametrize(("key", "source"), BROKEN)
def test_a_contradiction_is_found_and_names_its_key(key: str, source: dict[str, Any]) -> None:
    problems = validate_config(source).problems
    assert [(problem.kind, problem.path) for problem in problems] == [(ProblemKind.CONTRADICTION, key)]


@pytest.mark.parametrize("source", FINE)
def test_compatible_combinations_are_accepted(source: dict[str, Any]) -> None:
    assert validate_config(source).problems == []


def test_every_rule_has_a_case() -> None:
    configs = [validate_config(source).config for _, source in BROKEN]
    assert all(any(list(rule(config)) for config in configs) for rule in CONTRADICTION_RULES)
