"""Table of `deepspeed.ops`, `deepspeed.io`, `deepspeed.linear`, quantization, Muon and 1-bit optimizers."""

from windlass.compat.stand_in_entry import StandInEntry, differs, refused, works

_STEPS = "windlass.compat.optimizers"
_ADAM = "updates are those of torch's AdamW or Adam; amsgrad and bias_correction=False are refused"
_FUSED_ADAM = differs(f"{_STEPS}.fused_optimizers:FusedAdam", _ADAM)
_CPU_ADAM = differs(f"{_STEPS}.deepspeed_cpu_optimizers:DeepSpeedCPUAdam", f"{_ADAM}; 16-bit states are bf16")
_FUSED_LION = works(f"{_STEPS}.fused_optimizers:FusedLion")
_CPU_LION = works(f"{_STEPS}.deepspeed_cpu_optimizers:DeepSpeedCPULion")
_CPU_ADAGRAD = differs(f"{_STEPS}.deepspeed_cpu_optimizers:DeepSpeedCPUAdagrad", "amsgrad is refused")
_FUSED_LAMB = differs(f"{_STEPS}.fused_optimizers:FusedLamb", "max_grad_norm is refused: set gradient_clipping")
_ZENFLOW = refused(
    "ZenFlow's delayed updates are not built, see zero_optimization.zenflow; use FusedAdam or DeepSpeedCPUAdam with "
    "delayed_update in the configuration"
)
_ONE_BIT_ADAM = differs(
    f"{_STEPS}.one_bit_optimizers:OnebitAdam",
    "steps before freeze_step are torch's AdamW, with its bias correction; stages 0 to 2",
)
_ZERO_ONE_ADAM = differs(
    f"{_STEPS}.one_bit_optimizers:ZeroOneAdam", "the first steps are torch's AdamW, with its bias correction"
)
_ONE_BIT_LAMB = differs(f"{_STEPS}.one_bit_optimizers:OnebitLamb", "max_grad_norm is refused; stages 0 to 2")
_ITERATION = "always orthogonalised by the Newton-Schulz iteration"
_LAYER = refused("windlass has no transformer layers; use torch.nn.TransformerEncoderLayer, or a transformers model")
_BUILDERS = (
    "AsyncIOBuilder CCLCommBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder DeepCompileBuilder "
    "EvoformerAttnBuilder FPQuantizerBuilder FlashAttentionBuilder FusedAdamBuilder FusedLambBuilder FusedLionBuilder "
    "GDSBuilder InferenceBuilder InferenceCoreBuilder InferenceCutlassBuilder NotImplementedBuilder PinMemoryBuilder "
    "QuantizerBuilder RaggedOpsBuilder RaggedUtilsBuilder RandomLTDBuilder ShareMemCommBuilder SparseAttnBuilder "
    "SpatialInferenceBuilder StochasticTransformerBuilder TransformerBuilder UtilsBuilder"
)
_FLOATS = "runs on every device, in torch; codes and scales are windlass's own bytes"
_BASE = "the frozen base is a layer of its own, `base`, which zero_optimization.stage 3 shards over all ranks"
_ADAPTERS = "adapters exist from the start; frozen parameters and adapters are set"
_BUILDER = "nothing is compiled at run time: load() returns precompiled code, or raises and names an alternative"
_WRITERS = "windlass.compat.file_writers"

TABLE: dict[str, StandInEntry] = {
    "deepspeed.ops.adam.FusedAdam": _FUSED_ADAM,
    "deepspeed.ops.adam.fused_adam.FusedAdam": _FUSED_ADAM,
    "deepspeed.ops.adam.multi_tensor_apply.MultiTensorApply": works(f"{_STEPS}.fused_optimizers:MultiTensorApply"),
    "deepspeed.ops.adam.DeepSpeedCPUAdam": _CPU_ADAM,
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": _CPU_ADAM,
    **{
        f"deepspeed.ops.adam.{name}": _ZENFLOW
        for name in ("ZenFlowCPUAdam", "ZenFlowSelectiveAdamW", "ZenFlowSelectiveAdamW_stage3")
    },
    "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad": _CPU_ADAGRAD,
    "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad": _CPU_ADAGRAD,
    "deepspeed.ops.lion.DeepSpeedCPULion": _CPU_LION,
    "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion": _CPU_LION,
    "deepspeed.ops.lion.FusedLion": _FUSED_LION,
    "deepspeed.ops.lion.fused_lion.FusedLion": _FUSED_LION,
    "deepspeed.ops.lamb.FusedLamb": _FUSED_LAMB,
    "deepspeed.ops.lamb.fused_lamb.FusedLamb": _FUSED_LAMB,
    **{
        f"deepspeed.runtime.zero.muon.original_muon.{name}": differs(f"{_STEPS}.deepspeed_muon:{name}", _ITERATION)
        for name in ("Muon", "SingleDeviceMuon", "MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam", "muon_update")
    },
    "deepspeed.runtime.zero.muon.muon_optimizer.MuonWithAuxAdam": differs(
        f"{_STEPS}.deepspeed_muon:MuonWithAuxAdam", f"{_ITERATION}; AdamW's arguments are set in the groups"
    ),
    "deepspeed.runtime.fp16.onebit.OnebitLamb": _ONE_BIT_LAMB,
    "deepspeed.runtime.fp16.onebit.lamb.OnebitLamb": _ONE_BIT_LAMB,
    "deepspeed.runtime.fp16.onebit.ZeroOneAdam": _ZERO_ONE_ADAM,
    "deepspeed.runtime.fp16.onebit.zoadam.ZeroOneAdam": _ZERO_ONE_ADAM,
    **{
        f"deepspeed.ops.op_builder.{name}": differs(f"windlass.compat.op_builders:{name}", _BUILDER)
        for name in _BUILDERS.split()
    },
    "deepspeed.runtime.fp16.onebit.OnebitAdam": _ONE_BIT_ADAM,
    "deepspeed.runtime.fp16.onebit.adam.OnebitAdam": _ONE_BIT_ADAM,
    "deepspeed.ops.op_builder.builder.OpBuilder": differs("windlass.compat.op_builders:OpBuilder", _BUILDER),
    "deepspeed.ops.op_builder.OpBuilder": differs("windlass.compat.op_builders:OpBuilder", _BUILDER),
    "deepspeed.ops.op_builder.all_ops.ALL_OPS": works("windlass.compat.op_builders:ALL_OPS"),
    "deepspeed.ops.op_builder.ALL_OPS": works("windlass.compat.op_builders:ALL_OPS"),
    "deepspeed.ops.__compatible_ops__": works("windlass.compat.op_builders:COMPATIBLE_OPS"),
    "deepspeed.ops.aio.AsyncIOBuilder": differs("windlass.compat.op_builders:AsyncIOBuilder", _BUILDER),
    "deepspeed.ops.aio.aio_handle": differs(
        "windlass.compat.aio_handle:aio_handle", "threads use the page cache; the NVMe tier has its own I/O"
    ),
    "deepspeed.ops.DeepSpeedTransformerLayer": _LAYER,
    "deepspeed.ops.DeepSpeedTransformerConfig": _LAYER,
    "deepspeed.ops.transformer.DeepSpeedTransformerLayer": _LAYER,
    "deepspeed.ops.transformer.DeepSpeedTransformerConfig": _LAYER,
    "deepspeed.ops.transformer.inference.DeepSpeedTransformerInference": _LAYER,
    **{
        f"deepspeed.ops.fp_quantizer.{name}": differs(f"windlass.compat.fp_quantizer:{target}", _FLOATS)
        for name, target in {
            "FP_Quantize": "FP_Quantize",
            "Quantizer": "FloatQuantizer",
            "matmul_fp8": "matmul_fp8",
            "quantize.FP_Quantize": "FP_Quantize",
            "quantize.Quantizer": "FloatQuantizer",
        }.items()
    },
    **{
        f"deepspeed.linear.{prefix}{name}": differs(f"windlass.compat.optimized_linear:{target}", note)
        for module, name, target, note in (
            ("optimized_linear", "OptimizedLinear", "OptimizedLinear", _BASE),
            ("optimized_linear", "LoRAOptimizedLinear", "LoRAOptimizedLinear", _BASE),
            ("quantization", "QuantizedLinear", "QuantizedLinear", _FLOATS),
            ("quantization", "QuantizedParameter", "QuantizedParameter", _FLOATS),
            ("config", "LoRAConfig", "LoRAConfig", "base_weight_sharding has no effect of its own; offload is refused"),
            ("context_manager", "Init", "OptimizedLinearInit", _BASE),
            ("context_manager", "init_lora", "init_lora", _ADAPTERS),
        )
        for prefix in ("", f"{module}.")
    },
    "deepspeed.linear.QuantizationConfig": works("windlass.compat.optimized_linear:QuantizationConfig"),
    "deepspeed.linear.config.QuantizationConfig": works("windlass.compat.optimized_linear:QuantizationConfig"),
    "deepspeed.inference.quantization.quantization._init_group_wise_weight_quantization": works(
        "windlass.compat.module_quantization:init_group_wise_weight_quantization"
    ),
    "deepspeed.inference.quantization.layers.QuantizedLinear": differs(
        "windlass.kernels.packed_linear:PackedLinear", "made by the function above; the weight is packed bytes"
    ),
    "deepspeed.inference.quantization.layers.QuantizedEmbedding": differs(
        "windlass.kernels.packed_linear:PackedEmbedding", "made by the function above; the weight is packed bytes"
    ),
    "deepspeed.inference.quantization.utils.Quantizer": works(
        "windlass.compat.dimension_group_quantizer:DimensionGroupQuantizer"
    ),
    "deepspeed.inference.quantization.utils.DeQuantizer": works(
        "windlass.compat.dimension_group_quantizer:DimensionGroupDequantizer"
    ),
    "deepspeed.io.PyFileWriter": works(f"{_WRITERS}:PyFileWriter"),
    "deepspeed.io.MockFileWriter": works(f"{_WRITERS}:MockFileWriter"),
    "deepspeed.io.FastFileWriterConfig": works(f"{_WRITERS}:FastFileWriterConfig"),
    "deepspeed.io.FastFileWriter": differs(
        f"{_WRITERS}:FastFileWriter", "each writer writes its whole file, through the page cache"
    ),
}
