"""Table of `deepspeed.utils`, `deepspeed.runtime.utils`, constants, monitors, profilers, compression and others."""

from windlass.compat.stand_in_entry import NameStatus, StandInEntry, differs, works


def _rows_for(prefix: str, target_module: str, names: str, note: str = "") -> dict[str, StandInEntry]:
    """Return an entry for each of `names`; each name is the same in `target_module`."""
    state = NameStatus.DIFFERS if note else NameStatus.WORKS
    return {f"{prefix}.{name}": StandInEntry(state, f"{target_module}:{name}", note) for name in names.split()}


_MESSAGES = "windlass.compat.rank_logging"
_LEAVES = "windlass.compat.z3_leaf_modules"
_VALUES = "windlass.compat.tensor_fragment_api"
_MOVING = "windlass.compat.runtime_functions"
_NORMS = "windlass.compat.norm_functions"
_WORDS = "windlass.compat.runtime_constants"
_PINNED = "windlass.compat.pinned_memory"
_PIECES = "a shard is an equal part of the unit, not of the parameter; also below stage 3"
_AT_ALL = "works at stage 0 too, where DeepSpeed returns None"

_LEAF_NAMES = (
    "set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module z3_leaf_parameter set_z3_leaf_module "
    "set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix"
)
_LEAF = "only marks: windlass gathers modules as they run and needs no list of leaves"
_FULL_NAMES = (
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param "
    "safe_set_full_grad safe_set_full_optimizer_state safe_update_full_grad_vectorized"
)
_LOCAL_NAMES = (
    "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state safe_set_local_fp32_param "
    "safe_set_local_grad safe_set_local_optimizer_state"
)
_GROUP_NAMES = (
    "get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size get_model_parallel_group "
    "get_model_parallel_rank get_model_parallel_world_size get_tensor_model_parallel_group "
    "get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank get_tensor_model_parallel_world_size "
    "set_tensor_model_parallel_rank set_tensor_model_parallel_world_size initialize mpu mesh_device "
    "expert_tensor_parallel_world_size bwc_pipeline_parallel_world_size bwc_tensor_model_parallel_world_size "
    "DeprecatedException"
)
_MOVING_NAMES = (
    "copy_to_device move_to_device get_tensor_bytes compare_tensors_in_structures set_random_seed memory_status "
    "get_ma_status empty_cache torch_memory_reserved torch_max_memory_reserved noop_decorator noop_context "
    "ensure_directory_exists call_to_str get_only_unique_item get_inactive_params align_dense_tensors "
    "maybe_loss_for_backward DummyOptim"
)
_NORM_NAMES = (
    "clip_grad_norm_ get_grad_norm get_flattened_grad_norm get_weight_norm get_grad_zeros get_global_norm "
    "get_global_norm_of_tensors clip_tensors_by_global_norm clip_gradients combine_grad_norm_groups has_inf_or_nan "
    "is_invalid_grad_norm mask_nan_or_inf_with_val_inplace is_model_parallel_parameter CheckOverflow "
    "count_used_parameters_in_backward"
)
_OPTIMIZER_NAMES = (
    "ADAGRAD_OPTIMIZER ADAMW_OPTIMIZER ADAM_OPTIMIZER ADAM_W_MODE ADAM_W_MODE_DEFAULT LAMB_OPTIMIZER LION_OPTIMIZER "
    "MUADAMW_OPTIMIZER MUADAM_OPTIMIZER MUON_OPTIMIZER MUSGD_OPTIMIZER ONEBIT_ADAM_OPTIMIZER ONEBIT_LAMB_OPTIMIZER "
    "ZERO_ONE_ADAM_OPTIMIZER DEEPSPEED_OPTIMIZERS TENSOR_CORE_ALIGN_SIZE TORCH_ADAM_PARAM MAX_GRAD_NORM"
)
_PREPARED = "for isinstance: init_compression makes such a layer from the model's own"
_SEE = differs(f"{_MOVING}:see_memory_usage", "one line in windlass's format")

_UTILS: dict[str, StandInEntry] = {
    **_rows_for(
        "deepspeed.utils", _MESSAGES, "logger log_dist log_dist_once set_log_level_from_string get_caller_func"
    ),
    "deepspeed.utils.logging": works(_MESSAGES),
    "deepspeed.utils.torch.required_torch_version": works(f"{_MESSAGES}:required_torch_version"),
    "deepspeed.utils.groups": works(
        "windlass.compat.parallel_groups",
        "of an mpu, or of the engine built last; before that, all ranks are data ranks",
    ),
    **_rows_for("deepspeed.utils", "windlass.compat.parallel_groups", _GROUP_NAMES),
    "deepspeed.utils.exceptions.DeprecatedException": works("windlass.compat.parallel_groups:DeprecatedException"),
    **_rows_for(
        "deepspeed.utils.bwc",
        "windlass.compat.parallel_groups",
        "bwc_pipeline_parallel_world_size bwc_pipeline_parallel_group bwc_tensor_model_parallel_world_size "
        "bwc_tensor_model_parallel_rank bwc_tensor_model_parallel_group",
    ),
    **_rows_for("deepspeed.utils", _LEAVES, _LEAF_NAMES, _LEAF),
    **_rows_for("deepspeed.utils.z3_leaf_module", _LEAVES, f"{_LEAF_NAMES} apply_zero_leaf_module_config", _LEAF),
    **_rows_for("deepspeed.utils", _VALUES, _FULL_NAMES, _AT_ALL),
    **_rows_for("deepspeed.utils", _VALUES, _LOCAL_NAMES, _PIECES),
    **_rows_for("deepspeed.utils.tensor_fragment", _VALUES, _FULL_NAMES, _AT_ALL),
    **_rows_for("deepspeed.utils.tensor_fragment", _VALUES, _LOCAL_NAMES, _PIECES),
    "deepspeed.utils.fragment_address": works("windlass.compat.pickled_classes:fragment_address"),
    **_rows_for("deepspeed.utils", "windlass.compat.attribute_paths", "recursive_getattr recursive_setattr"),
    **_rows_for(
        "deepspeed.utils.module_utils", "windlass.compat.attribute_paths", "recursive_getattr recursive_setattr"
    ),
    "deepspeed.utils.OnDevice": differs("windlass.compat.on_device:OnDevice", "torch.Tensor(...) is not affected"),
    "deepspeed.utils.init_on_device.OnDevice": differs(
        "windlass.compat.on_device:OnDevice", "torch.Tensor(...) is not affected"
    ),
    "deepspeed.utils.instrument_w_nvtx": works("windlass.compat.nvtx_ranges:instrument_w_nvtx"),
    "deepspeed.utils.nvtx.instrument_w_nvtx": works("windlass.compat.nvtx_ranges:instrument_w_nvtx"),
    "deepspeed.utils.RepeatingLoader": works("windlass.compat.repeating_loader:RepeatingLoader"),
    "deepspeed.utils.get_numactl_cmd": works("windlass.compat.numa_cores:get_numactl_cmd"),
    "deepspeed.utils.numa": works("windlass.compat.numa_cores"),
    "deepspeed.utils.timer": differs(
        "windlass.compat.wall_clock_timers", "means are in milliseconds, and log lines have windlass's format"
    ),
    "deepspeed.utils.is_initialized": works("torch.distributed:is_initialized"),
    **_rows_for("deepspeed.utils.pin_memory_tracker", _PINNED, "track_pinned_memory pinned_memory_summary"),
    "deepspeed.utils.pin_memory_tracker._PinnedMemoryTracker": works(f"{_PINNED}:PinnedMemoryTracker"),
    "deepspeed.utils.pin_memory_tracker._tracker": works(f"{_PINNED}:tracker"),
    "deepspeed.utils.pin_memory_tracker._fmt_bytes": works(f"{_PINNED}:format_bytes"),
    "deepspeed.utils.pin_memory": differs(
        "windlass.compat.locked_memory", "memory that was unlocked stays usable until its tensor is freed"
    ),
    "deepspeed.utils.get_accelerator": works("windlass.compat.accelerator.real_accelerator:get_accelerator"),
}

_RUNTIME: dict[str, StandInEntry] = {
    "deepspeed.runtime.comm.coalesced_collectives.reduce_scatter_coalesced": works(
        "windlass.compat.coalesced_collectives:reduce_scatter_coalesced"
    ),
    "deepspeed.runtime.torch_autocast": differs(
        "windlass.compat.autocast_comm_dtypes",
        "no parameter is marked: gradients are communicated in communication_data_type",
    ),
    **_rows_for("deepspeed.runtime.utils", _MOVING, _MOVING_NAMES),
    **_rows_for("deepspeed.runtime.utils", _NORMS, _NORM_NAMES),
    **_rows_for("deepspeed.runtime.zero.stage_1_and_2", _NORMS, "count_used_parameters_in_backward"),
    **_rows_for("deepspeed.runtime.zero.stage3", _NORMS, "count_used_parameters_in_backward"),
    **_rows_for(
        "deepspeed.runtime.utils",
        "windlass.compat.balanced_partition",
        "partition_uniform partition_balanced prefix_sum_inc",
    ),
    **_rows_for(
        "deepspeed.runtime.utils",
        "windlass.compat.parallel_groups",
        "bwc_pipeline_parallel_world_size bwc_pipeline_parallel_group bwc_tensor_model_parallel_rank",
    ),
    "deepspeed.runtime.utils.see_memory_usage": _SEE,
    "deepspeed.runtime.data_pipeline.constants": works("windlass.compat.data_pipeline_constants"),
    "deepspeed.runtime.lr_schedules": differs(
        "windlass.compat.lr_schedule_arguments",
        "the first step of WarmupCosineLR runs at warmup_min_ratio, where DeepSpeed runs it at 0 for any ratio",
    ),
    "deepspeed.runtime.constants": works(_WORDS, "without the help texts"),
    **_rows_for("deepspeed.runtime.config", _WORDS, _OPTIMIZER_NAMES),
    "deepspeed.runtime.dataloader.RepeatingLoader": works("windlass.compat.repeating_loader:RepeatingLoader"),
}

_STANDARD = "windlass.compat.root_names"
_ROOT: dict[str, StandInEntry] = {
    **_rows_for("deepspeed", "typing", "Any Callable Dict Optional Tuple Union"),
    "deepspeed.Optimizer": works("torch.optim:Optimizer"),
    **_rows_for(
        "deepspeed",
        _STANDARD,
        "argparse json os torch pkg_version dist git_hash git_branch __version_major__ __version_minor__ "
        "__version_patch__ KV MLA_KV MLA_Q QUERY NOT_HEAD_BLOCKED DeepSpeedOptimizerCallable "
        "DeepSpeedSchedulerCallable",
    ),
    "deepspeed.__git_hash__": works(f"{_STANDARD}:git_hash"),
    "deepspeed.__git_branch__": works(f"{_STANDARD}:git_branch"),
    **_rows_for("deepspeed.compat", _STANDARD, "get_annotations get_annotations_from_namespace"),
    "deepspeed.git_version_info": works("windlass.compat.git_version_info"),
    "deepspeed.git_version_info_installed": works("windlass.compat.git_version_info"),
    **_rows_for("deepspeed", _MESSAGES, "logger log_dist"),
    "deepspeed.MUON_OPTIMIZER": works(f"{_WORDS}:MUON_OPTIMIZER"),
    "deepspeed.TORCH_DISTRIBUTED_DEFAULT_PORT": works(
        "windlass.compat.launcher_constants:TORCH_DISTRIBUTED_DEFAULT_PORT"
    ),
    "deepspeed.constants": works("windlass.compat.launcher_constants"),
    "deepspeed.OnDevice": differs("windlass.compat.on_device:OnDevice", "torch.Tensor(...) is not affected"),
    **_rows_for("deepspeed", "windlass.compat.script_config", "load_ds_config set_optimizer_flags"),
    "deepspeed.runtime.tensor_parallel.init_utils.load_ds_config": works(
        "windlass.compat.script_config:load_ds_config"
    ),
    **_rows_for(
        "deepspeed.compression.compress",
        "windlass.compress.compression_training",
        "init_compression student_initialization",
    ),
    "deepspeed.compression.compress.redundancy_clean": works("windlass.compress.redundancy_clean:redundancy_clean"),
    **_rows_for("deepspeed.autotuning.utils", "windlass.compat.nested_keys", "get_val_by_key set_val_by_key"),
    **{
        f"deepspeed.compression.basic_layer.{name}": differs(f"windlass.compress.compressed_layers:{target}", _PREPARED)
        for name, target in (
            ("LinearLayer_Compress", "CompressedLinear"),
            ("Conv2dLayer_Compress", "CompressedConv2d"),
            ("Embedding_Compress", "CompressedEmbedding"),
        )
    },
    **_rows_for(
        "deepspeed.compression.helper",
        "windlass.compat.attribute_paths",
        "recursive_getattr recursive_setattr convert_conv1d_to_linear",
    ),
}

_MONITORS: dict[str, StandInEntry] = {
    **_rows_for(
        "deepspeed.monitor.monitor",
        "windlass.compat.monitor_writers",
        "CometMonitor Monitor MonitorMaster TensorBoardMonitor WandbMonitor csvMonitor",
    ),
    **_rows_for(
        "deepspeed.monitor.config", "windlass.compat.monitor_writers", "DeepSpeedMonitorConfig get_monitor_config"
    ),
    "deepspeed.monitor.config.TensorBoardConfig": works("windlass.config.monitor_section:TensorBoard"),
    "deepspeed.monitor.config.WandbConfig": works("windlass.config.monitor_section:Wandb"),
    "deepspeed.monitor.config.CometConfig": works("windlass.config.monitor_section:Comet"),
    "deepspeed.monitor.config.CSVConfig": works("windlass.config.monitor_section:CsvMonitor"),
    "deepspeed.monitor.tensorboard.TensorBoardMonitor": works("windlass.compat.monitor_writers:TensorBoardMonitor"),
    "deepspeed.monitor.comet.CometMonitor": works("windlass.compat.monitor_writers:CometMonitor"),
    "deepspeed.monitor.wandb.WandbMonitor": works("windlass.compat.monitor_writers:WandbMonitor"),
    "deepspeed.monitor.csv_monitor.csvMonitor": works("windlass.compat.monitor_writers:csvMonitor"),
}

_FLOPS = "windlass.compat.flops_profiler"
_COUNTED = "counts products, convolutions and attention, not elementwise work; backward and recomputation too"
_FORMATS = "number_to_string macs_to_string flops_to_string params_to_string duration_to_string"
_PROFILING: dict[str, StandInEntry] = {
    **_rows_for("deepspeed.profiling.flops_profiler", _FLOPS, "FlopsProfiler get_model_profile", _COUNTED),
    **_rows_for("deepspeed.profiling.flops_profiler.profiler", _FLOPS, "FlopsProfiler get_model_profile", _COUNTED),
    **_rows_for("deepspeed.profiling.flops_profiler.profiler", "windlass.observe.flop_report", _FORMATS),
    "deepspeed.profiling.config.DeepSpeedFlopsProfilerConfig": works(
        "windlass.compat.config_sections:DeepSpeedFlopsProfilerConfig"
    ),
}

TABLE: dict[str, StandInEntry] = {**_PROFILING, **_MONITORS, **_UTILS, **_RUNTIME, **_ROOT}
