"""Sections for inference: the hybrid engine, and the configurations of two inference engines."""

from __future__ import annotations

from typing import Any, Literal

from windlass.config.config_section import ConfigSection, Count, Int, Positive
from windlass.config.key_status import refused

_NOT_BUILT = "not yet built: the inference engine"


class HybridEngine(ConfigSection):
    """Alternation of training and generation."""

    refusal = "not yet built: the hybrid engine; write false"
    enable_key = "enabled"

    enabled: bool = refused(False, "")
    max_out_tokens: Positive = refused(512, "")
    inference_tp_size: Positive = refused(1, "")
    release_inference_cache: bool = refused(False, "")
    pin_parameters: bool = refused(True, "")
    tp_gather_partition_size: Positive = refused(8, "")
    enable_cuda_graph: bool = refused(False, "")


class InferenceTensorParallel(ConfigSection):
    """Tensor-parallel axis of an inference engine."""

    enabled: bool = refused(True, "")
    tp_size: Positive = refused(1, "")
    tp_grain_size: Positive = refused(64, "")
    mpu: Any = refused(None, "")
    tp_group: Any = refused(None, "")


class InferenceMoe(ConfigSection):
    """Experts of an inference engine."""

    enabled: bool = refused(True, "")
    ep_size: Positive = refused(1, "")
    num_experts: list[Int] = refused([1], "", aliases=("moe_experts",))
    type: Literal["standard", "residual"] = refused("standard", "")
    ep_mp_group: Any = refused(None, "")
    expert_group: Any = refused(None, "", aliases=("ep_group",))


class ActivationQuant(ConfigSection):
    """Quantized activations of an inference engine."""

    enabled: bool = refused(True, "")
    num_bits: Positive = refused(8, "")
    q_type: Literal["symmetric", "asymmetric"] = refused("symmetric", "")
    q_groups: Positive = refused(1, "")


class WeightQuant(ActivationQuant):
    """Quantized weights of an inference engine."""

    quantized_initialization: dict[str, Any] = refused(dict, "")
    post_init_quant: dict[str, Any] = refused(dict, "")


class QkvQuant(ConfigSection):
    """Quantized attention projections of an inference engine."""

    enabled: bool = refused(True, "")


class InferenceQuant(ConfigSection):
    """Quantization of an inference engine."""

    activation: ActivationQuant = refused(ActivationQuant, "")
    weight: WeightQuant = refused(WeightQuant, "")
    qkv: QkvQuant = refused(QkvQuant, "")


class InferenceCheckpoint(ConfigSection):
    """Source of an inference engine's weights."""

    checkpoint_dir: str | None = refused(None, "")
    save_mp_checkpoint_path: str | None = refused(None, "")
    base_dir: str | None = refused(None, "")


class InitInference(ConfigSection):
    """Configuration of `init_inference`."""

    refusal = _NOT_BUILT

    kernel_inject: bool = refused(False, "", aliases=("replace_with_kernel_inject",))
    dtype: str = refused("torch.float16", "")
    tp: InferenceTensorParallel = refused(InferenceTensorParallel, "", aliases=("tensor_parallel",))
    enable_cuda_graph: bool = refused(False, "")
    use_triton: bool = refused(False, "")
    triton_autotune: bool = refused(False, "")
    zero: dict[str, Any] = refused(dict, "")
    tm: bool = refused(True, "", aliases=("triangular_masking",))
    moe: bool | InferenceMoe = refused(InferenceMoe, "")
    keep_module_on_host: bool = refused(False, "")
    quant: InferenceQuant = refused(InferenceQuant, "")
    checkpoint: str | dict[str, Any] | None = refused(None, "")
    base_dir: str = refused("", "")
    set_empty_params: bool = refused(False, "")
    save_mp_checkpoint_path: str | None = refused(None, "")
    ckpt_config: InferenceCheckpoint = refused(InferenceCheckpoint, "", aliases=("checkpoint_config",))
    return_tuple: bool = refused(True, "")
    training_mp_size: Positive = refused(1, "")
    replace_method: str = refused("auto", "")
    injection_dict: dict[str, Any] | None = refused(None, "", aliases=("injection_policy",))
    injection_policy_tuple: list[Any] | None = refused(None, "")
    args: dict[str, Any] | None = refused(None, "", aliases=("config",))
    max_tokens: Positive = refused(1024, "", aliases=("max_out_tokens",))
    min_tokens: Count = refused(1, "", aliases=("min_out_tokens",))
    transposed_mode: bool = refused(False, "")
    mp_size: Positive = refused(1, "")
    mpu: Any = refused(None, "")
    ep_size: Positive = refused(1, "")
    expert_group: Any = refused(None, "", aliases=("ep_group",))
    expert_mp_group: Any = refused(None, "", aliases=("ep_mp_group",))
    moe_experts: list[Int] = refused([1], "")
    moe_type: Literal["standard", "residual"] = refused("standard", "")


class KvMemory(ConfigSection):
    """Memory of the key-value cache."""

    mode: Literal["reserve", "allocate"] = refused("reserve", "")
    size: Positive = refused(1_000_000_000, "")


class StateManager(ConfigSection):
    """Limits of an engine with continuous batching."""

    max_tracked_sequences: Positive = refused(2048, "")
    max_ragged_batch_size: Positive = refused(768, "")
    max_ragged_sequence_count: Positive = refused(512, "")
    max_context: Positive = refused(8192, "")
    memory_config: KvMemory = refused(KvMemory, "")
    offload: bool = refused(False, "")


class RaggedQuantization(ConfigSection):
    """Quantization in an engine with continuous batching."""

    quantization_mode: Literal["wf6af16"] | None = refused(None, "")


class RaggedTensorParallel(ConfigSection):
    """Tensor-parallel axis of an engine with continuous batching."""

    tp_size: Positive = refused(1, "")


class RaggedInference(ConfigSection):
    """Configuration of an engine with continuous batching."""

    refusal = _NOT_BUILT

    tp: RaggedTensorParallel = refused(RaggedTensorParallel, "", aliases=("tensor_parallel",))
    manager: StateManager = refused(StateManager, "", aliases=("state_manager",))
    quantization: RaggedQuantization = refused(RaggedQuantization, "")
