"""`deepspeed.utils`, `deepspeed.runtime.utils`, timers, constants, the root's small names: tools around training."""

from windlass.compat.entry import Entry, State, differs, works


def _all(prefix: str, home: str, names: str, how: str = "") -> dict[str, Entry]:
    """One row for each of `names`, which are called the same in `home`."""
    state = State.DIFFERS if how else State.WORKS
    return {f"{prefix}.{name}": Entry(state, f"{home}:{name}", how) for name in names.split()}


_MESSAGES = "windlass.compat.messages"
_LEAVES = "windlass.compat.leaves"
_VALUES = "windlass.compat.whole_values"
_MOVING = "windlass.compat.moving"
_NORMS = "windlass.compat.norms"
_WORDS = "windlass.compat.config_words"
_PINNED = "windlass.compat.pinned_memory"
_PIECES = "a piece is this rank's part of the unit's even cut, not of the parameter's; also below stage 3"
_AT_ALL = "answers at stage 0 too, where DeepSpeed gives None"

_LEAF_NAMES = (
    "set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module z3_leaf_parameter set_z3_leaf_module "
    "set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix"
)
_LEAF = "marks only: windlass gathers what runs, and needs no list of leaves"
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
_SEE = differs(f"{_MOVING}:see_memory_usage", "one line in windlass' words")

_UTILS: dict[str, Entry] = {
    **_all("deepspeed.utils", _MESSAGES, "logger log_dist log_dist_once set_log_level_from_string get_caller_func"),
    "deepspeed.utils.logging": works(_MESSAGES),
    "deepspeed.utils.torch.required_torch_version": works(f"{_MESSAGES}:required_torch_version"),
    "deepspeed.utils.groups": works(
        "windlass.compat.groups", "of an mpu, or of the engine made last; before it all ranks are data ranks"
    ),
    **_all("deepspeed.utils", "windlass.compat.groups", _GROUP_NAMES),
    "deepspeed.utils.exceptions.DeprecatedException": works("windlass.compat.groups:DeprecatedException"),
    **_all(
        "deepspeed.utils.bwc",
        "windlass.compat.groups",
        "bwc_pipeline_parallel_world_size bwc_pipeline_parallel_group bwc_tensor_model_parallel_world_size "
        "bwc_tensor_model_parallel_rank bwc_tensor_model_parallel_group",
    ),
    **_all("deepspeed.utils", _LEAVES, _LEAF_NAMES, _LEAF),
    **_all("deepspeed.utils.z3_leaf_module", _LEAVES, f"{_LEAF_NAMES} apply_zero_leaf_module_config", _LEAF),
    **_all("deepspeed.utils", _VALUES, _FULL_NAMES, _AT_ALL),
    **_all("deepspeed.utils", _VALUES, _LOCAL_NAMES, _PIECES),
    **_all("deepspeed.utils.tensor_fragment", _VALUES, _FULL_NAMES, _AT_ALL),
    **_all("deepspeed.utils.tensor_fragment", _VALUES, _LOCAL_NAMES, _PIECES),
    "deepspeed.utils.fragment_address": works("windlass.compat.pickled:fragment_address"),
    **_all("deepspeed.utils", "windlass.compat.attribute_paths", "recursive_getattr recursive_setattr"),
    **_all("deepspeed.utils.module_utils", "windlass.compat.attribute_paths", "recursive_getattr recursive_setattr"),
    "deepspeed.utils.OnDevice": differs("windlass.compat.on_device:OnDevice", "torch.Tensor(...) is left alone"),
    "deepspeed.utils.init_on_device.OnDevice": differs(
        "windlass.compat.on_device:OnDevice", "torch.Tensor(...) is left alone"
    ),
    "deepspeed.utils.instrument_w_nvtx": works("windlass.compat.ranges:instrument_w_nvtx"),
    "deepspeed.utils.nvtx.instrument_w_nvtx": works("windlass.compat.ranges:instrument_w_nvtx"),
    "deepspeed.utils.RepeatingLoader": works("windlass.compat.repeating:RepeatingLoader"),
    "deepspeed.utils.get_numactl_cmd": works("windlass.compat.cores:get_numactl_cmd"),
    "deepspeed.utils.numa": works("windlass.compat.cores"),
    "deepspeed.utils.timer": differs(
        "windlass.compat.timers", "means are in milliseconds, and what is logged is windlass'"
    ),
    "deepspeed.utils.is_initialized": works("torch.distributed:is_initialized"),
    **_all("deepspeed.utils.pin_memory_tracker", _PINNED, "track_pinned_memory pinned_memory_summary"),
    "deepspeed.utils.pin_memory_tracker._PinnedMemoryTracker": works(f"{_PINNED}:PinnedMemoryTracker"),
    "deepspeed.utils.pin_memory_tracker._tracker": works(f"{_PINNED}:tracker"),
    "deepspeed.utils.pin_memory_tracker._fmt_bytes": works(f"{_PINNED}:format_bytes"),
    "deepspeed.utils.get_accelerator": works("windlass.compat.accelerator.choose:get_accelerator"),
}

_RUNTIME: dict[str, Entry] = {
    "deepspeed.runtime.comm.coalesced_collectives.reduce_scatter_coalesced": works(
        "windlass.compat.coalesced:reduce_scatter_coalesced"
    ),
    "deepspeed.runtime.torch_autocast": differs(
        "windlass.compat.autocast", "no parameter is marked: gradients travel in communication_data_type"
    ),
    **_all("deepspeed.runtime.utils", _MOVING, _MOVING_NAMES),
    **_all("deepspeed.runtime.utils", _NORMS, _NORM_NAMES),
    **_all("deepspeed.runtime.zero.stage_1_and_2", _NORMS, "count_used_parameters_in_backward"),
    **_all("deepspeed.runtime.zero.stage3", _NORMS, "count_used_parameters_in_backward"),
    **_all("deepspeed.runtime.utils", "windlass.compat.parting", "partition_uniform partition_balanced prefix_sum_inc"),
    **_all(
        "deepspeed.runtime.utils",
        "windlass.compat.groups",
        "bwc_pipeline_parallel_world_size bwc_pipeline_parallel_group bwc_tensor_model_parallel_rank",
    ),
    "deepspeed.runtime.utils.see_memory_usage": _SEE,
    "deepspeed.runtime.lr_schedules": works("windlass.compat.tuning_arguments"),
    "deepspeed.runtime.constants": works(_WORDS, "without the help texts"),
    **_all("deepspeed.runtime.config", _WORDS, _OPTIMIZER_NAMES),
    "deepspeed.runtime.dataloader.RepeatingLoader": works("windlass.compat.repeating:RepeatingLoader"),
}

_STANDARD = "windlass.compat.standard"
_ROOT: dict[str, Entry] = {
    **_all("deepspeed", "typing", "Any Callable Dict Optional Tuple Union"),
    "deepspeed.Optimizer": works("torch.optim:Optimizer"),
    **_all(
        "deepspeed",
        _STANDARD,
        "argparse json os torch pkg_version dist git_hash git_branch __version_major__ __version_minor__ "
        "__version_patch__ KV MLA_KV MLA_Q QUERY NOT_HEAD_BLOCKED DeepSpeedOptimizerCallable "
        "DeepSpeedSchedulerCallable",
    ),
    "deepspeed.__git_hash__": works(f"{_STANDARD}:git_hash"),
    "deepspeed.__git_branch__": works(f"{_STANDARD}:git_branch"),
    **_all("deepspeed.compat", _STANDARD, "get_annotations get_annotations_from_namespace"),
    "deepspeed.git_version_info": works("windlass.compat.build_facts"),
    "deepspeed.git_version_info_installed": works("windlass.compat.build_facts"),
    **_all("deepspeed", _MESSAGES, "logger log_dist"),
    "deepspeed.MUON_OPTIMIZER": works(f"{_WORDS}:MUON_OPTIMIZER"),
    "deepspeed.TORCH_DISTRIBUTED_DEFAULT_PORT": works("windlass.compat.constants:TORCH_DISTRIBUTED_DEFAULT_PORT"),
    "deepspeed.constants": works("windlass.compat.constants"),
    "deepspeed.OnDevice": differs("windlass.compat.on_device:OnDevice", "torch.Tensor(...) is left alone"),
    **_all("deepspeed", "windlass.compat.script_arguments", "load_ds_config set_optimizer_flags"),
    "deepspeed.runtime.tensor_parallel.init_utils.load_ds_config": works(
        "windlass.compat.script_arguments:load_ds_config"
    ),
    **_all(
        "deepspeed.compression.helper",
        "windlass.compat.attribute_paths",
        "recursive_getattr recursive_setattr convert_conv1d_to_linear",
    ),
}

_MONITORS: dict[str, Entry] = {
    **_all(
        "deepspeed.monitor.monitor",
        "windlass.compat.monitors",
        "CometMonitor Monitor MonitorMaster TensorBoardMonitor WandbMonitor csvMonitor",
    ),
    **_all("deepspeed.monitor.config", "windlass.compat.monitors", "DeepSpeedMonitorConfig get_monitor_config"),
    "deepspeed.monitor.config.TensorBoardConfig": works("windlass.config.monitor:TensorBoard"),
    "deepspeed.monitor.config.WandbConfig": works("windlass.config.monitor:Wandb"),
    "deepspeed.monitor.config.CometConfig": works("windlass.config.monitor:Comet"),
    "deepspeed.monitor.config.CSVConfig": works("windlass.config.monitor:CsvMonitor"),
    "deepspeed.monitor.tensorboard.TensorBoardMonitor": works("windlass.compat.monitors:TensorBoardMonitor"),
    "deepspeed.monitor.comet.CometMonitor": works("windlass.compat.monitors:CometMonitor"),
    "deepspeed.monitor.wandb.WandbMonitor": works("windlass.compat.monitors:WandbMonitor"),
    "deepspeed.monitor.csv_monitor.csvMonitor": works("windlass.compat.monitors:csvMonitor"),
}

TABLE: dict[str, Entry] = {**_MONITORS, **_UTILS, **_RUNTIME, **_ROOT}
