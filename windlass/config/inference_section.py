"""Sections for inference: the hybrid engine, and the configurations of two inference engines."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, field_validator, model_validator

from windlass.config.compression_section import ModuleQuantization
from windlass.config.config_section import ConfigSection, Count, Int, Positive
from windlass.config.key_status import accepted, honoured, key_facts, refused

_NO_GRAPH = "the decode step needs no graph to be correct"
_OWN_ATTENTION = "attention goes through windlass's kernels and torch's, which need no choice"
_GROUPS = "groups are made from tp and ep over neighbouring ranks; start the ranks in that order and delete the key"
_QUANT = "this engine packs weights, and has no such setting; set dtype to torch.int8, or pass weights='int8'"


def use_own_names(section: type[ConfigSection], given: Any) -> Any:
    """Return the dict `given` with field names of `section` in place of their aliases, and with an integer `tp`
    replaced by a section with that size. A value that is not a dict is returned unchanged.

    Raises:
        ValueError: a field is given under two names.
    """
    if not isinstance(given, dict):
        return given
    own = {alias: name for name, field in section.model_fields.items() for alias in key_facts(field)["aliases"]}
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = str(own.get(key, key))
        if name in values:
            raise ValueError(f"{key} is another name of {name}; give one of them")
        is_size = name == "tp" and isinstance(value, int) and not isinstance(value, bool)
        values[name] = {"tp_size": value} if is_size else value
    return values


def _dtype_text(value: Any) -> Any:
    return str(value) if type(value).__module__ == "torch" else value  # a dtype; the schema does not import torch


class HybridEngine(ConfigSection):
    """Alternation of training and generation."""

    enabled: bool = accepted(False, "engine.generate works with every engine, with or without the section")
    max_out_tokens: Positive = accepted(512, "the KV cache grows by blocks up to the model's window")
    inference_tp_size: Positive = refused(1, "generation uses the training's own tensor parallelism; set parallel.tp")
    release_inference_cache: bool = honoured(False)
    """Free the KV cache after each call of `generate`."""
    pin_parameters: bool = accepted(True, "parameters are used where they are, without a copy to pin")
    tp_gather_partition_size: Positive = accepted(8, "parameters of stage 3 are gathered once a call, unit by unit")
    enable_cuda_graph: bool = accepted(False, _NO_GRAPH)


class InferenceTensorParallel(ConfigSection):
    """Tensor-parallel axis of an inference engine."""

    enabled: bool = honoured(True)
    """False: the model is not sharded, whatever `tp_size` is."""
    tp_size: Positive = honoured(1)
    """Number of ranks along the tensor-parallel axis."""
    tp_grain_size: Positive = accepted(64, "matrices are sharded by attention heads, or as evenly as they allow")
    mpu: Any = refused(None, _GROUPS)
    tp_group: Any = refused(None, _GROUPS)


class InferenceMoe(ConfigSection):
    """Sharding of the experts in an inference engine."""

    enabled: bool = honoured(True)
    """False: experts are not sharded, whatever `ep_size` is."""
    ep_size: Positive = honoured(1)
    """Number of ranks over which the experts of each layer are sharded."""
    num_experts: list[Int] = accepted([1], "read from the model", aliases=("moe_experts",))
    type: Literal["standard", "residual"] = accepted("standard", "read from the model")
    ep_mp_group: Any = refused(None, _GROUPS)
    expert_group: Any = refused(None, _GROUPS, aliases=("ep_group",))


class ActivationQuant(ConfigSection):
    """Quantized activations of an inference engine."""

    enabled: bool = accepted(True, "DeepSpeed reads this section only where dtype is torch.int8")
    num_bits: Positive = refused(8, _QUANT)
    q_type: Literal["symmetric", "asymmetric"] = refused("symmetric", _QUANT)
    q_groups: Positive = refused(1, _QUANT)


class WeightQuant(ActivationQuant):
    """Quantized weights of an inference engine."""

    quantized_initialization: ModuleQuantization = honoured(ModuleQuantization)
    """Format of all linear layers and embeddings; see `weight_quantization` of the training configuration."""
    post_init_quant: dict[str, ModuleQuantization] = honoured(dict)
    """Format of the modules whose names contain the key."""


class QkvQuant(ConfigSection):
    """Quantized attention projections of an inference engine."""

    enabled: bool = accepted(True, "all linear layers are packed alike")


class InferenceQuant(ConfigSection):
    """Quantization of an inference engine."""

    activation: ActivationQuant = accepted(ActivationQuant, "see its keys")
    weight: WeightQuant = honoured(WeightQuant)
    """Quantized weights."""
    qkv: QkvQuant = accepted(QkvQuant, "see its keys")


_CHECKPOINT = "DeepSpeed does not read this key; write checkpoint and base_dir at the top level"
_SAVE = "DeepSpeed writes parts of its own layers there; save the model with save_pretrained instead"


class InferenceCheckpoint(ConfigSection):
    """Source of an inference engine's weights."""

    checkpoint_dir: str | None = refused(None, _CHECKPOINT)
    save_mp_checkpoint_path: str | None = refused(None, _SAVE)
    base_dir: str | None = refused(None, _CHECKPOINT)


class InitInference(ConfigSection):
    """Configuration of `init_inference`. A key may have any one of its names, and `tp` may be an integer."""

    @model_validator(mode="before")
    @classmethod
    def _use_own_names(cls, given: Any) -> Any:
        return use_own_names(cls, given)

    kernel_inject: bool = accepted(
        False, "the fast paths need no other layers", aliases=("replace_with_kernel_inject",)
    )
    dtype: Annotated[str, BeforeValidator(_dtype_text)] = honoured("torch.float16")
    """Dtype of the parameters; torch.float16 is float32 on the CPU, and torch.int8 packs linear layers in int8."""
    tp: InferenceTensorParallel = honoured(InferenceTensorParallel, aliases=("tensor_parallel",))
    """Tensor-parallel axis; an integer is its size."""
    enable_cuda_graph: bool = accepted(False, _NO_GRAPH)
    use_triton: bool = accepted(False, _OWN_ATTENTION)
    triton_autotune: bool = accepted(False, _OWN_ATTENTION)
    zero: dict[str, Any] = refused(
        dict,
        "a module that is in memory already is not streamed; give its directory to windlass.LLM(path, "
        "weights_tier='disk'), or evaluate at stage 3 with windlass.initialize",
    )
    tm: bool = accepted(True, "masks are those of the model", aliases=("triangular_masking",))
    moe: bool | InferenceMoe = honoured(InferenceMoe)
    """Sharding of experts; a boolean instead of a section: true to shard experts, false not to."""
    keep_module_on_host: bool = refused(False, "the module is computed where it is; move it before, or delete the key")
    quant: InferenceQuant = honoured(InferenceQuant)
    """Quantization."""
    checkpoint: str | dict[str, Any] | None = honoured(None)
    """Weights to load into the model, which may be on the meta device: a description `{"type": "ds_model" (or `BLOOM`,
    `Megatron`), "checkpoints": [files of whole tensors], "version": 1.0}`, the path of its JSON file, a file of weights
    (.safetensors, .bin, .pt), a model's directory, or a checkpoint directory of DeepSpeed or windlass."""
    base_dir: str = honoured("")
    """Directory of the files that `checkpoint` lists with relative names; empty: the working directory."""
    set_empty_params: bool = accepted(False, "parameters on the meta device get their values from checkpoint")
    save_mp_checkpoint_path: str | None = refused(None, _SAVE)
    ckpt_config: InferenceCheckpoint = accepted(InferenceCheckpoint, "see its keys", aliases=("checkpoint_config",))
    return_tuple: bool = accepted(True, "layers keep their own outputs")
    training_mp_size: Positive = refused(1, "whole weights are loaded; merge the parts with windlass export first")
    replace_method: str = accepted("auto", "DeepSpeed itself ignores it")
    injection_dict: dict[Any, Any] | None = accepted(
        None, "layers to sum over ranks are found by the model's plan", aliases=("injection_policy",)
    )
    injection_policy_tuple: Any = accepted(None, "layers to sum over ranks are found by the model's plan")
    args: dict[str, Any] | None = accepted(None, "DeepSpeed itself ignores it", aliases=("config",))
    max_tokens: Positive = honoured(1024, aliases=("max_out_tokens",))
    """Maximum number of tokens of a prompt and its answer together; the model's window if the key is absent."""
    min_tokens: Count = accepted(1, "the KV cache grows by blocks", aliases=("min_out_tokens",))
    transposed_mode: bool = accepted(False, "weights keep their layout")
    mp_size: Positive = honoured(1)
    """Old name of `tp.tp_size`."""
    mpu: Any = refused(None, _GROUPS)
    ep_size: Positive = honoured(1)
    """Old name of `moe.ep_size`."""
    expert_group: Any = refused(None, _GROUPS, aliases=("ep_group",))
    expert_mp_group: Any = refused(None, _GROUPS, aliases=("ep_mp_group",))
    moe_experts: list[Int] = accepted([1], "read from the model")
    moe_type: Literal["standard", "residual"] = accepted("standard", "read from the model")


class KvMemory(ConfigSection):
    """Memory of the key-value cache of an engine with continuous batching."""

    mode: Literal["reserve", "allocate"] = honoured("reserve")
    """Size of the cache. `reserve`: a part of the free memory, which windlass chooses; `allocate`: `size` blocks."""
    size: Positive = honoured(1_000_000_000)
    """Number of blocks of 64 tokens, if `mode` is `allocate`; otherwise without effect."""

    @field_validator("mode", mode="before")
    @classmethod
    def _use_value(cls, given: Any) -> Any:
        return getattr(given, "value", given)  # `given` may be a member of DeepSpeed's enumeration


class StateManager(ConfigSection):
    """Limits of an engine with continuous batching."""

    max_tracked_sequences: Positive = accepted(2048, "further requests wait in a queue")
    max_ragged_batch_size: Positive = honoured(768)
    """Maximum number of tokens in a forward: `max_tokens_per_step` of `windlass.LLM`, whose default applies if the key
    is absent."""
    max_ragged_sequence_count: Positive = honoured(512)
    """Maximum number of sequences that run at the same time: `max_sequences` of `windlass.LLM`, whose default applies
    if the key is absent."""
    max_context: Positive = accepted(8192, "sequences end at the model's window; set max_length for less")
    memory_config: KvMemory = honoured(KvMemory)
    """Memory of the key-value cache."""
    offload: bool = refused(False, "DeepSpeed has no offload here either; pass swap_bytes to windlass.LLM or mii")

    @model_validator(mode="after")
    def _compare_limits(self) -> StateManager:
        for name in ("max_tracked_sequences", "max_ragged_batch_size"):
            limit = getattr(self, name)
            if self.max_ragged_sequence_count > limit:
                raise ValueError(
                    f"max_ragged_sequence_count is {self.max_ragged_sequence_count}, more than {name} ({limit}); "
                    "write at most that"
                )
        return self


class RaggedQuantization(ConfigSection):
    """Quantization in an engine with continuous batching."""

    quantization_mode: Literal["wf6af16"] | None = refused(None, "a format of GPUs; pass weights='int8' to mii instead")


class RaggedTensorParallel(ConfigSection):
    """Tensor-parallel axis of an engine with continuous batching."""

    tp_size: Positive = honoured(1)
    """Number of ranks along the tensor-parallel axis."""


class RaggedInference(ConfigSection):
    """Configuration of an engine with continuous batching, for `mii.pipeline` and `mii.serve`."""

    @model_validator(mode="before")
    @classmethod
    def _use_own_names(cls, given: Any) -> Any:
        return use_own_names(cls, given)

    tp: RaggedTensorParallel = honoured(RaggedTensorParallel, aliases=("tensor_parallel",))
    """Tensor-parallel axis."""
    manager: StateManager = honoured(StateManager, aliases=("state_manager",))
    """Limits of a step, and the key-value cache."""
    quantization: RaggedQuantization = honoured(RaggedQuantization)
    """Quantization; its only mode is refused."""

    @property
    def tensor_parallel(self) -> RaggedTensorParallel:
        """`tp`, by DeepSpeed's other name."""
        return self.tp

    @property
    def state_manager(self) -> StateManager:
        """`manager`, by DeepSpeed's other name."""
        return self.manager
