"""Engine methods that return configuration values: one table row per method, answered from windlass's configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from windlass.base.dtypes import parse_dtype

# Method -> path in the configuration.
CONFIG_KEYS: dict[str, str] = {
    "gradient_predivide_factor": "gradient_predivide_factor",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "memory_breakdown": "memory_breakdown",
    "dataloader_drop_last": "dataloader_drop_last",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "aio_config": "aio",
    "swap_tensor_config": "aio",
    "tensor_parallel_config": "tensor_parallel",
    "curriculum_learning_config": "curriculum_learning",
    "data_efficiency_config": "data_efficiency",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "zero_gather_16bit_weights_on_model_save": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_reduce_scatter": "zero_optimization.reduce_scatter",
    "zero_overlap_comm": "zero_optimization.overlap_comm_enabled",
    "zero_offload_optimizer": "zero_optimization.offload_optimizer",
    "zero_offload_param": "zero_optimization.offload_param",
    "zero_sub_group_size": "zero_optimization.sub_group_size",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_multi_rank_bucket_allreduce": "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "zero_allgather_partitions": "zero_optimization.allgather_partitions",
    "zero_allgather_sequential": "zero_optimization.stage3_allgather_sequential",
    "zero_contiguous_gradients": "zero_optimization.contiguous_gradients",
    "zero_elastic_checkpoint": "zero_optimization.elastic_checkpoint",
    "zero_compute_grad_norm": "zero_optimization.compute_grad_norm",
    "zero_load_from_fp32_weights": "zero_optimization.load_from_fp32_weights",
    "zero_legacy_stage1": "zero_optimization.legacy_stage1",
    "zero_ignore_unused_parameters": "zero_optimization.ignore_unused_parameters",
    "zero_round_robin_gradients": "zero_optimization.round_robin_gradients",
    "zero_hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
    "zero_max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "zero_max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
    "zero_prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_module_granularity_threshold": "zero_optimization.stage3_module_granularity_threshold",
    "zero_param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "zero_model_persistence_threshold": "zero_optimization.stage3_model_persistence_threshold",
    "zero_parameter_alignment": "zero_optimization.parameter_alignment",
    "zero_log_trace_cache_warnings": "zero_optimization.log_trace_cache_warnings",
    "zero_quantized_weights": "zero_optimization.zero_quantized_weights",
    "zero_quantized_nontrainable_weights": "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_quantized_gradients": "zero_optimization.zero_quantized_gradients",
    "zero_save_muon_momentum_buffer_in_memory": "zero_optimization.save_muon_momentum_buffer_in_memory",
    "is_sanity_checks_enabled": "zero_optimization.enable_sanity_checks",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "flops_profiler_module_depth": "flops_profiler.module_depth",
    "flops_profiler_top_modules": "flops_profiler.top_modules",
    "flops_profiler_detailed": "flops_profiler.detailed",
    "flops_profiler_output_file": "flops_profiler.output_file",
    "flops_profiler_recompute_fwd_factor": "flops_profiler.recompute_fwd_factor",
    "autotuning_enabled": "autotuning.enabled",
    "autotuning_start_profile_step": "autotuning.start_profile_step",
    "autotuning_end_profile_step": "autotuning.end_profile_step",
    "autotuning_metric": "autotuning.metric",
    "curriculum_learning_enabled": "curriculum_learning.enabled",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "zenflow_config": "zero_optimization.zenflow",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
}


def config_value(config: Any, path: str) -> Any:
    """Return the value at a dotted path of a configuration. The value may be a section."""
    for part in path.split("."):
        config = getattr(config, part)
    return config


def _offload_device(config: Any, section: str) -> str:
    found = getattr(config.zero_optimization, section)
    return found.device if found is not None else "none"


def _param_and_accumulation_dtypes(config: Any) -> tuple[Any, Any]:
    table = config.dtype_table()
    return parse_dtype(table.param_dtype), parse_dtype(table.accumulation_dtype)


# Method -> function that computes its result from the configuration.
COMPUTED_ANSWERS: dict[str, Callable[[Any], Any]] = {
    "autotuning_metric_path": lambda c: c.autotuning.metric_path or os.path.abspath("autotuning_metric.json"),
    "autotuning_model_info_path": lambda c: c.autotuning.model_info_path or os.path.abspath("model_info.json"),
    "autotuning_profile_model_info": lambda c: c.autotuning.enabled and c.autotuning.model_info.profile,
    "optimizer_params": lambda c: dict(c.optimizer.params) if c.optimizer is not None else None,
    "scheduler_params": lambda c: dict(c.scheduler.params) if c.scheduler is not None else None,
    "optimizer_legacy_fusion": lambda c: c.optimizer is not None and c.optimizer.legacy_fusion,
    "postscale_gradients": lambda c: not c.prescale_gradients,
    "clip_fp32_gradients": lambda c: False,
    "get_data_types": _param_and_accumulation_dtypes,
    "torch_autocast_dtype": lambda c: parse_dtype(c.torch_autocast.dtype or "bf16"),
    "torch_autocast_lower_precision_safe_modules": lambda c: list(c.torch_autocast.lower_precision_safe_modules or ()),
    "initial_dynamic_scale": lambda c: 2**c.fp16.initial_scale_power,
    "dynamic_loss_scale_args": lambda c: {
        "init_scale": 2**c.fp16.initial_scale_power,
        "scale_window": c.fp16.loss_scale_window,
        "min_scale": c.fp16.min_loss_scale,
        "delayed_shift": c.fp16.hysteresis,
        "consecutive_hysteresis": c.fp16.consecutive_hysteresis,
    },
    "zero_optimization_partition_gradients": lambda c: c.zero_optimization.stage >= 2,
    "zero_optimization_partition_weights": lambda c: c.zero_optimization.stage >= 3,
    "zero_cpu_offload": lambda c: _offload_device(c, "offload_optimizer") == "cpu",
    "zero_use_cpu_optimizer": lambda c: _offload_device(c, "offload_optimizer") in ("cpu", "nvme"),
    "zero_nvme_offload_optimizer": lambda c: _offload_device(c, "offload_optimizer") == "nvme",
    "zero_partial_offload": lambda c: getattr(c.zero_optimization.offload_optimizer, "ratio", 1.0),
    "super_offload": lambda c: bool(
        c.zero_optimization.offload_optimizer and c.zero_optimization.offload_optimizer.super_offload
    ),
    "cpuadam_cores_perc": lambda c: getattr(c.zero_optimization.offload_optimizer, "cpuadam_cores_perc", 0.9),
    "checkpoint_tag_validation_enabled": lambda c: c.checkpoint.tag_validation.lower() != "ignore",
    "checkpoint_tag_validation_fail": lambda c: c.checkpoint.tag_validation.lower() == "fail",
    "checkpoint_serialization_enabled": lambda c: True,
    "checkpoint_writer_enabled": lambda c: False,
    "data_sampling_enabled": lambda c: False,
    "data_sampling_config": lambda c: {},
    "random_ltd_enabled": lambda c: False,
    "random_ltd_config": lambda c: {},
    "autotp_size": lambda c: c.tensor_parallel.autotp_size,
    "compile_autosp": lambda c: False,
    "compile_autotp": lambda c: False,
    "compile_zero_optimization_stage": lambda c: False,
    "uses_parallelization_pass_only": lambda c: False,
    "is_deepcompile_enabled": lambda c: False,
    "is_deepcompile_active": lambda c: False,
}
