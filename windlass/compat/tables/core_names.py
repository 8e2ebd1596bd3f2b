"""Table from DeepSpeed's names to windlass: package root, engine, configuration and ZeRO."""

from windlass.compat.stand_in_entry import StandInEntry, differs, works

_PARTITION = "deepspeed.runtime.zero.partition_parameters"
_ZERO = {
    "GatheredParameters": works("windlass.zero:GatheredParameters"),
    "Init": works("windlass.compat.partition_parameters:Init"),
    "ZeroParamStatus": works("windlass.compat.zero_param_status:ZeroParamStatus"),
    "ZeroParamType": works("windlass.compat.zero_param_status:ZeroParamType"),
    "register_external_parameter": differs(
        "windlass.compat.partition_parameters:register_external_parameter",
        "not needed: windlass detects a module that uses a parameter of another module",
    ),
    "unregister_external_parameter": differs(
        "windlass.compat.partition_parameters:unregister_external_parameter",
        "not needed; see register_external_parameter",
    ),
    "DeepSpeedZeRoOffload": differs(
        "windlass.compat.parameter_offload:ParameterOffload",
        "created by an engine at stage 3; its hooks do nothing",
    ),
}

_SECTIONS = {
    "precision_config": "DeepSpeedFP16Config DeepSpeedBF16Config",
    "zero.config": "DeepSpeedZeroConfig DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig",
    "zero.offload_config": "DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig",
    "zero.leaf_module_config": (
        "DeepSpeedZeroLeafModuleConfig DEFAULT_LEAF_MODULE_CLASSES DEFAULT_LEAF_MODULE_NAMES "
        "DEFAULT_LEAF_MODULE_NAME_SUFFIXES"
    ),
}
_GETTERS = {
    "precision_config": "get_bfloat16_config get_float16_config",
    "config": (
        "get_torch_autocast_enabled get_torch_autocast_dtype get_lower_precision_safe_modules "
        "get_gradient_accumulation_steps get_managed_gradient_accumulation get_communication_data_type "
        "get_prescale_gradients get_gradient_predivide_factor get_gradient_allreduce_op get_steps_per_print "
        "get_disable_allgather get_dump_state get_disable_python_gc get_gradient_clipping get_pipeline_config "
        "get_optimizer_name get_optimizer_params get_optimizer_gradient_clipping get_optimizer_legacy_fusion "
        "get_zero_allow_untested_optimizer get_zero_force_ds_cpu_optimizer get_scheduler_name get_scheduler_params "
        "get_train_batch_size get_train_micro_batch_size_per_gpu get_wall_clock_breakdown get_memory_breakdown "
        "get_expert_data_topo_config get_checkpoint_params get_data_types_params get_checkpoint_tag_validation_mode "
        "get_dataloader_drop_last get_log_level get_float16_config get_bfloat16_config"
    ),
}
_KINDS = "windlass.compat.optimizer_classes"
_KIND = (
    "`initialize` uses one class for all stages; it passes `isinstance` checks of the class that DeepSpeed would use"
)
_LINEARS = (
    "LinearFunctionForZeroStage3 LinearModuleForZeroStage3 zero3_linear_wrap autocast_custom_fwd autocast_custom_bwd "
    "noop_decorator"
)
_LINEAR = (
    "replaces torch's linear only if the configuration has memory_efficient_linear: true, which is DeepSpeed's default"
)

TABLE: dict[str, StandInEntry] = {
    **{
        f"deepspeed.runtime.zero.linear.{name}": differs(f"windlass.compat.zero_linear:{name}", _LINEAR)
        for name in _LINEARS.split()
    },
    f"{_PARTITION}.zero3_linear_wrap": differs("windlass.compat.zero_linear:zero3_linear_wrap", _LINEAR),
    f"{_PARTITION}.CUDAQuantizer": differs(
        "windlass.compat.group_quantizer:CUDAQuantizer",
        "works on every device; for scripts: quantized gathers use a codec of their own",
    ),
    f"{_PARTITION}.InsertPostInitMethodToModuleSubClasses": differs(
        "windlass.compat.zero_linear:InsertPostInitMethodToModuleSubClasses",
        "base class of Init that only has `linear_bk`: parameters are sharded without replaced constructors",
    ),
    f"{_PARTITION}.MultipleAllGatherHandles": works("windlass.compat.partition_parameters:MultipleAllGatherHandles"),
    f"{_PARTITION}.print_rank_0": works("windlass.compat.partition_parameters:print_rank_0"),
    f"{_PARTITION}.partitioned_param_data_shape": differs(
        "windlass.compat.partition_parameters:partitioned_param_data_shape",
        "the shape of a sharded parameter in strict mode; otherwise it keeps its full shape: read ds_status",
    ),
    f"{_PARTITION}._contradicting_single_rank_pg_error": works(
        "windlass.compat.partition_parameters:_contradicting_single_rank_pg_error"
    ),
    "deepspeed.__version__": works("windlass.compat.stand_in_version:VERSION"),
    "deepspeed.version": works("windlass.compat.stand_in_version:VERSION"),
    **{
        f"deepspeed.{name}": works(f"windlass.compat.inference_engine:{name.rpartition('.')[2]}")
        for name in (
            "init_inference",
            "default_inference_config",
            "InferenceEngine",
            "inference.engine.InferenceEngine",
        )
    },
    **{
        f"deepspeed.{name}": differs(
            f"windlass.config.inference_section:{target}", "a section of windlass's schema, with the same keys"
        )
        for name, target in (
            ("DeepSpeedInferenceConfig", "InitInference"),
            ("inference.config.DeepSpeedInferenceConfig", "InitInference"),
            ("inference.config.DeepSpeedTPConfig", "InferenceTensorParallel"),
            ("inference.DeepSpeedTPConfig", "RaggedTensorParallel"),
            ("inference.v2.config_v2.DeepSpeedTPConfig", "RaggedTensorParallel"),
            ("inference.RaggedInferenceEngineConfig", "RaggedInference"),
            ("inference.v2.config_v2.RaggedInferenceEngineConfig", "RaggedInference"),
            ("inference.v2.config_v2.QuantizationConfig", "RaggedQuantization"),
            ("inference.v2.ragged.DSStateManagerConfig", "StateManager"),
            ("inference.v2.ragged.manager_configs.DSStateManagerConfig", "StateManager"),
            ("inference.v2.ragged.manager_configs.MemoryConfig", "KvMemory"),
        )
    },
    **{
        f"deepspeed.{name}": differs(
            "windlass.compat.deepspeed_engine:DeepSpeedEngine", "every engine generates; see `engine.generate`"
        )
        for name in ("DeepSpeedHybridEngine", "runtime.hybrid_engine.DeepSpeedHybridEngine")
    },
    "deepspeed.initialize": works("windlass.compat.deepspeed_initialize:initialize"),
    "deepspeed.add_config_arguments": works("windlass.launch.config_arguments:add_config_arguments"),
    "deepspeed.DeepSpeedEngine": works("windlass.compat.deepspeed_engine:DeepSpeedEngine"),
    "deepspeed.DeepSpeedConfig": works("windlass.compat.deepspeed_config:DeepSpeedConfig"),
    "deepspeed.DeepSpeedConfigError": works("windlass.base.errors:ConfigError"),
    "deepspeed.DeepSpeedOptimizer": works("windlass.engine.sharded_optimizer:ShardedOptimizer"),
    "deepspeed.DeepSpeedDataLoader": works("windlass.compat.deepspeed_data_loader:DeepSpeedDataLoader"),
    "deepspeed.checkpointing": works("windlass.compat.activation_names"),
    "deepspeed.runtime.engine.DeepSpeedEngine": works("windlass.compat.deepspeed_engine:DeepSpeedEngine"),
    "deepspeed.runtime.engine.DeepSpeedOptimizerCallable": works("typing:Callable"),
    "deepspeed.runtime.engine.DeepSpeedSchedulerCallable": works("typing:Callable"),
    "deepspeed.runtime.config.DeepSpeedConfig": works("windlass.compat.deepspeed_config:DeepSpeedConfig"),
    "deepspeed.runtime.config.DeepSpeedConfigError": works("windlass.base.errors:ConfigError"),
    "deepspeed.runtime.base_optimizer.DeepSpeedOptimizer": works("windlass.engine.sharded_optimizer:ShardedOptimizer"),
    "deepspeed.runtime.base_optimizer.ZeROOptimizer": differs(f"{_KINDS}:ZeROOptimizer", _KIND),
    "deepspeed.runtime.dataloader.DeepSpeedDataLoader": works(
        "windlass.compat.deepspeed_data_loader:DeepSpeedDataLoader"
    ),
    "deepspeed.runtime.activation_checkpointing.checkpointing": works("windlass.compat.activation_names"),
    **{
        f"deepspeed.runtime.activation_checkpointing.offload_activations.{name}": differs(
            f"windlass.compat.marked_offload:{name}", "on a device that shares the host's memory nothing is moved"
        )
        for name in (
            "CheckpointActivationOffloadStats",
            "CheckpointHiddenStatesOffload",
            "get_checkpoint_hidden_states_offloading_ctx_manager",
        )
    },
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer": differs(f"{_KINDS}:BF16_Optimizer", _KIND),
    "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer": differs(f"{_KINDS}:FP16_Optimizer", _KIND),
    "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer": differs(f"{_KINDS}:FP16_UnfusedOptimizer", _KIND),
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase": works("windlass.compat.pickled_classes:LossScalerBase"),
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": works("windlass.compat.pickled_classes:LossScaler"),
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": works("windlass.compat.pickled_classes:DynamicLossScaler"),
    **{
        f"deepspeed.runtime.fp16.loss_scaler.{name}": works(f"windlass.compat.pickled_classes:{name}")
        for name in ("INITIAL_LOSS_SCALE", "SCALE_WINDOW", "DELAYED_SHIFT", "CONSECUTIVE_HYSTERESIS", "MIN_LOSS_SCALE")
    },
    "deepspeed.runtime.zero.config.ZeroStageEnum": works("windlass.compat.pickled_classes:ZeroStageEnum"),
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum": works(
        "windlass.compat.pickled_classes:OffloadDeviceEnum"
    ),
    "deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum": works(
        "windlass.compat.pickled_classes:OffloadStateTypeEnum"
    ),
    "deepspeed.utils.tensor_fragment.fragment_address": works("windlass.compat.pickled_classes:fragment_address"),
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": differs(f"{_KINDS}:DeepSpeedZeroOptimizer", _KIND),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": differs(
        f"{_KINDS}:DeepSpeedZeroOptimizer_Stage3", _KIND
    ),
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload": _ZERO["DeepSpeedZeRoOffload"],
    "deepspeed.runtime.zero.stage3.DeepSpeedZeRoOffload": _ZERO["DeepSpeedZeRoOffload"],
    "deepspeed.runtime.zero.parameter_offload.ZeROOrderedDict": differs(
        "windlass.compat.parameter_offload:ZeROOrderedDict",
        "only stores: parameters that a forward reads are gathered without it",
    ),
    "deepspeed.runtime.zero.parameter_offload.ensure_zero_ordered_dict": works(
        "windlass.compat.parameter_offload:ensure_zero_ordered_dict"
    ),
    **{
        f"deepspeed.{module}.{name}": works(f"windlass.compat.tiled_linear:{name}")
        for module in ("zero", "runtime.zero", "runtime.zero.tiling")
        for name in ("TiledLinear", "TiledLinearReturnBias")
    },
    "deepspeed.zero.unwrap_model_for_generation": works(
        "windlass.compat.unwrap_for_generation:unwrap_model_for_generation"
    ),
    "deepspeed.runtime.zero.unwrap_model_for_generation": works(
        "windlass.compat.unwrap_for_generation:unwrap_model_for_generation"
    ),
    **{
        f"deepspeed.{module}.MiCS_Init": differs(
            "windlass.compat.partition_parameters:Init", "same as Init: mics_shard_size is a configuration key"
        )
        for module in ("zero", "runtime.zero", "runtime.zero.mics")
    },
    **{
        f"deepspeed.runtime.zero.utils.{name}": works(f"windlass.compat.zero_functions:{name}")
        for name in (
            "ZeRORuntimeException",
            "is_builtin_type",
            "isinstance_namedtuple",
            "apply_to_tensors_only",
            "get_lst_from_rank0",
        )
    },
    "deepspeed.runtime.zero.utils.is_zero_param": works("windlass.compat.partition_parameters:is_zero_param"),
    "deepspeed.runtime.zero.utils.is_zero_supported_optimizer": differs(
        "windlass.compat.zero_functions:is_zero_supported_optimizer", "True for every torch optimizer"
    ),
    **{
        f"deepspeed.runtime.zero.{module}.{name}": works(f"windlass.compat.memory_estimates:{name}")
        for module, stage in (("stage_1_and_2", 2), ("stage3", 3))
        for name in (
            f"estimate_zero{stage}_model_states_mem_needs",
            f"estimate_zero{stage}_model_states_mem_needs_all_cold",
            f"estimate_zero{stage}_model_states_mem_needs_all_live",
            "model_to_params",
        )
    },
    "deepspeed.runtime.config_utils": works("windlass.compat.config_models"),
    **{
        f"deepspeed.runtime.{module}.{name}": works(f"windlass.compat.config_sections:{name}")
        for module, names in _SECTIONS.items()
        for name in names.split()
    },
    **{
        f"deepspeed.runtime.{module}.{name}": works(f"windlass.compat.config_getters:{name}")
        for module, names in _GETTERS.items()
        for name in names.split()
    },
    f"{_PARTITION}.zero_wrapper_for_fp_tensor_constructor": differs(
        "windlass.compat.partition_parameters:zero_wrapper_for_fp_tensor_constructor",
        "can be replaced but is never called: torch's constructors are not wrapped",
    ),
    f"{_PARTITION}.is_zero_param": works("windlass.compat.partition_parameters:is_zero_param"),
    f"{_PARTITION}.zero_init_context": works("windlass.compat.partition_parameters:zero_init_context"),
    f"{_PARTITION}.get_accelerator": works("windlass.compat.accelerator:get_accelerator"),
}
for _name in ("arange", "empty", "zeros", "ones", "full", "tensor", "eye", "randn"):
    TABLE[f"{_PARTITION}._orig_torch_{_name}"] = works(f"windlass.compat.partition_parameters:_orig_torch_{_name}")
for _name, _entry in _ZERO.items():
    TABLE[f"deepspeed.zero.{_name}"] = _entry
    TABLE[f"deepspeed.runtime.zero.{_name}"] = _entry
    if _name != "DeepSpeedZeRoOffload":
        TABLE[f"{_PARTITION}.{_name}"] = _entry
