"""The root, the engine, the configuration and ZeRO."""

from windlass.compat.entry import Entry, differs, refused, works

_PARTITION = "deepspeed.runtime.zero.partition_parameters"
_ZERO = {
    "GatheredParameters": works("windlass.zero:GatheredParameters"),
    "Init": works("windlass.compat.partition:Init"),
    "ZeroParamStatus": works("windlass.compat.status:ZeroParamStatus"),
    "ZeroParamType": works("windlass.compat.status:ZeroParamType"),
    "register_external_parameter": differs(
        "windlass.compat.partition:register_external_parameter",
        "not needed: a module that uses a parameter of another is found by itself",
    ),
    "unregister_external_parameter": differs(
        "windlass.compat.partition:unregister_external_parameter", "not needed, as register_external_parameter"
    ),
    "DeepSpeedZeRoOffload": differs(
        "windlass.compat.offload:ParameterOffload", "made by an engine at stage 3; its hooks are in nobody's way"
    ),
}

TABLE: dict[str, Entry] = {
    "deepspeed.__version__": works("windlass.compat.version:VERSION"),
    "deepspeed.version": works("windlass.compat.version:VERSION"),
    "deepspeed.initialize": works("windlass.compat.initialize:initialize"),
    "deepspeed.add_config_arguments": works("windlass.launch.arguments:add_config_arguments"),
    "deepspeed.DeepSpeedEngine": works("windlass.compat.engine:DeepSpeedEngine"),
    "deepspeed.DeepSpeedConfig": works("windlass.compat.configuration:DeepSpeedConfig"),
    "deepspeed.DeepSpeedConfigError": works("windlass.base.errors:ConfigError"),
    "deepspeed.DeepSpeedOptimizer": works("windlass.engine.optimizer:ShardedOptimizer"),
    "deepspeed.DeepSpeedDataLoader": works("windlass.compat.loader:DeepSpeedDataLoader"),
    "deepspeed.checkpointing": works("windlass.checkpointing"),
    "deepspeed.runtime.engine.DeepSpeedEngine": works("windlass.compat.engine:DeepSpeedEngine"),
    "deepspeed.runtime.engine.DeepSpeedOptimizerCallable": works("typing:Callable"),
    "deepspeed.runtime.config.DeepSpeedConfig": works("windlass.compat.configuration:DeepSpeedConfig"),
    "deepspeed.runtime.config.DeepSpeedConfigError": works("windlass.base.errors:ConfigError"),
    "deepspeed.runtime.base_optimizer.DeepSpeedOptimizer": works("windlass.engine.optimizer:ShardedOptimizer"),
    "deepspeed.runtime.base_optimizer.ZeROOptimizer": works("windlass.engine.optimizer:ShardedOptimizer"),
    "deepspeed.runtime.dataloader.DeepSpeedDataLoader": works("windlass.compat.loader:DeepSpeedDataLoader"),
    "deepspeed.runtime.activation_checkpointing.checkpointing": works("windlass.checkpointing"),
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer": works("windlass.engine.optimizer:ShardedOptimizer"),
    "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer": differs(
        "windlass.engine.optimizer:ShardedOptimizer", "one optimizer serves all precisions; made by `initialize`"
    ),
    "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer": differs(
        "windlass.engine.optimizer:ShardedOptimizer", "one optimizer serves all precisions; made by `initialize`"
    ),
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase": works("windlass.compat.pickled:LossScalerBase"),
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": works("windlass.compat.pickled:LossScaler"),
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": works("windlass.compat.pickled:DynamicLossScaler"),
    **{
        f"deepspeed.runtime.fp16.loss_scaler.{name}": works(f"windlass.compat.pickled:{name}")
        for name in ("INITIAL_LOSS_SCALE", "SCALE_WINDOW", "DELAYED_SHIFT", "CONSECUTIVE_HYSTERESIS", "MIN_LOSS_SCALE")
    },
    "deepspeed.runtime.zero.config.ZeroStageEnum": works("windlass.compat.pickled:ZeroStageEnum"),
    "deepspeed.runtime.zero.config.DeepSpeedZeroConfig": works("windlass.config.zero:Zero"),
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum": works("windlass.compat.pickled:OffloadDeviceEnum"),
    "deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum": works("windlass.compat.pickled:OffloadStateTypeEnum"),
    "deepspeed.utils.tensor_fragment.fragment_address": works("windlass.compat.pickled:fragment_address"),
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": works("windlass.engine.optimizer:ShardedOptimizer"),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": works("windlass.engine.optimizer:ShardedOptimizer"),
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload": _ZERO["DeepSpeedZeRoOffload"],
    "deepspeed.runtime.zero.stage3.DeepSpeedZeRoOffload": _ZERO["DeepSpeedZeRoOffload"],
    **{
        f"deepspeed.{module}.{name}": refused("tiled linear layers are not built; use nn.Linear")
        for module in ("zero", "runtime.zero", "runtime.zero.tiling")
        for name in ("TiledLinear", "TiledLinearReturnBias")
    },
    "deepspeed.zero.unwrap_model_for_generation": works("windlass.compat.generation:unwrap_model_for_generation"),
    "deepspeed.runtime.zero.unwrap_model_for_generation": works(
        "windlass.compat.generation:unwrap_model_for_generation"
    ),
    **{
        f"deepspeed.{module}.MiCS_Init": differs("windlass.compat.partition:Init", "Init: mics_shard_size is a key")
        for module in ("zero", "runtime.zero", "runtime.zero.mics")
    },
    **{
        f"deepspeed.runtime.zero.utils.{name}": works(f"windlass.compat.zero_tools:{name}")
        for name in (
            "ZeRORuntimeException",
            "is_builtin_type",
            "isinstance_namedtuple",
            "apply_to_tensors_only",
            "get_lst_from_rank0",
        )
    },
    "deepspeed.runtime.zero.utils.is_zero_param": works("windlass.compat.partition:is_zero_param"),
    "deepspeed.runtime.zero.utils.is_zero_supported_optimizer": differs(
        "windlass.compat.zero_tools:is_zero_supported_optimizer", "any optimizer of torch's kind is"
    ),
    **{
        f"deepspeed.runtime.zero.{module}.{name}": works(f"windlass.compat.memory_needs:{name}")
        for module, stage in (("stage_1_and_2", 2), ("stage3", 3))
        for name in (
            f"estimate_zero{stage}_model_states_mem_needs",
            f"estimate_zero{stage}_model_states_mem_needs_all_cold",
            f"estimate_zero{stage}_model_states_mem_needs_all_live",
            "model_to_params",
        )
    },
    "deepspeed.runtime.config_utils": works("windlass.compat.config_models"),
    "deepspeed.runtime.precision_config.DeepSpeedFP16Config": works("windlass.config.precision:Fp16"),
    "deepspeed.runtime.precision_config.DeepSpeedBF16Config": works("windlass.config.precision:Bf16"),
    "deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig": works(
        "windlass.config.offload:OffloadParam"
    ),
    "deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig": works(
        "windlass.config.offload:OffloadOptimizer"
    ),
    "deepspeed.runtime.zero.config.DeepSpeedZeroOffloadParamConfig": works("windlass.config.offload:OffloadParam"),
    "deepspeed.runtime.zero.config.DeepSpeedZeroOffloadOptimizerConfig": works(
        "windlass.config.offload:OffloadOptimizer"
    ),
    f"{_PARTITION}.zero_wrapper_for_fp_tensor_constructor": differs(
        "windlass.compat.partition:zero_wrapper_for_fp_tensor_constructor",
        "can be replaced, and is never called: torch's constructors are left alone",
    ),
    f"{_PARTITION}.is_zero_param": works("windlass.compat.partition:is_zero_param"),
    f"{_PARTITION}.zero_init_context": works("windlass.compat.partition:zero_init_context"),
    f"{_PARTITION}.get_accelerator": works("windlass.compat.accelerator:get_accelerator"),
}
for _name in ("arange", "empty", "zeros", "ones", "full", "tensor", "eye", "randn"):
    TABLE[f"{_PARTITION}._orig_torch_{_name}"] = works(f"windlass.compat.partition:_orig_torch_{_name}")
for _name, _entry in _ZERO.items():
    TABLE[f"deepspeed.zero.{_name}"] = _entry
    TABLE[f"deepspeed.runtime.zero.{_name}"] = _entry
    if _name != "DeepSpeedZeRoOffload":
        TABLE[f"{_PARTITION}.{_name}"] = _entry
