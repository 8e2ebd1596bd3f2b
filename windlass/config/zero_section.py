"""The `zero_optimization` section: ZeRO stage, sizes of collectives, quantized messages and offload."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from windlass.config.config_section import NUMBER, ConfigSection, Count, Int, Names, Positive
from windlass.config.key_status import accepted, honoured, refused
from windlass.config.offload_section import OffloadOptimizer, OffloadParam, ZenFlowConfig
from windlass.config.registered_codecs import QuantizingCodec

NO_MODEL_LIMIT = 2**63 - 1
_LEAF_REASON = (
    "modules are unsharded when they run, and ranks may run different ones; zero_optimization.blocks sets the blocks"
)


def _off_or_positive(value: int) -> int:
    if value != -1 and value < 1:
        raise PydanticCustomError("shard_size", "input should be -1 (off) or a number of ranks >= 1")
    return value


class LeafModuleConfig(ConfigSection):
    """Modules whose whole subtree DeepSpeed gathers at once, because ranks may run different parts of it."""

    classes: Names = accepted(list, _LEAF_REASON)
    names: Names = accepted(list, _LEAF_REASON)
    name_suffixes: Names = accepted(list, _LEAF_REASON)


class LocoConfig(ConfigSection):
    """Error feedback of quantized gradients."""

    err_beta: Annotated[float, Field(ge=0, lt=1), NUMBER] = honoured(0.8)
    """Weight of the previous error; 1 - err_beta is the weight of the part that the last message left out."""
    reset_T: Positive = honoured(1024)  # noqa: N815 - DeepSpeed's spelling
    """Number of gradient reductions of a unit after which its stored errors are reset to zero."""


class ZeroConfig(ConfigSection):
    """Data that is sharded over ranks, and sizes of its collectives. All sizes are numbers of elements."""

    stage: Annotated[int, Field(ge=0, le=3), NUMBER] = honoured(0)
    """0: no sharding; 1: shard master weights and optimizer states; 2: gradients too; 3: parameters too."""
    reduce_bucket_size: Positive = honoured(500_000_000)
    """Maximum number of gradient elements reduced in one collective."""
    allgather_bucket_size: Positive = honoured(500_000_000)
    """Maximum number of parameter elements all-gathered in one collective after a step."""
    reduce_scatter: bool = honoured(True)
    """Reduce-scatter gradients, so that each rank receives only its shard; false: all-reduce and keep the shard."""
    allgather_partitions: bool = honoured(True)
    """All-gather updated shards in one collective; false: one broadcast for each rank."""
    contiguous_gradients: bool = honoured(True)
    """Write gradients directly to one flat buffer; false: copy them there before the reduction."""
    overlap_comm: bool | None = honoured(None)
    """Overlap communication with computation; true when absent."""
    round_robin_gradients: bool = honoured(False)
    """Start the reduction of shards with a different peer on each rank, so that not all wait for the same peer."""
    sub_group_size: Positive = honoured(1_000_000_000)
    """Maximum number of elements that the optimizer updates at once."""
    ignore_unused_parameters: bool = honoured(True)
    """Leave a parameter without gradient unchanged; false: raise an error that names it."""
    stage3_prefetch_bucket_size: Count = honoured(50_000_000, aliases=("prefetch_bucket_size",))
    """Maximum number of elements that are prefetched."""
    stage3_param_persistence_threshold: Count = honoured(100_000, aliases=("param_persistence_threshold",))
    """Number of elements below which a parameter is persistent: it is never resharded."""
    stage3_model_persistence_threshold: Count = honoured(NO_MODEL_LIMIT, aliases=("model_persistence_threshold",))
    """Maximum total number of elements of persistent parameters."""
    stage3_max_live_parameters: Count = honoured(1_000_000_000, aliases=("max_live_parameters",))
    """Maximum number of unsharded elements at any time."""
    stage3_max_reuse_distance: Count = honoured(1_000_000_000, aliases=("max_reuse_distance",))
    """Keep a parameter unsharded if it is used again before this many elements of other parameters are used."""
    stage3_gather_16bit_weights_on_model_save: bool = honoured(
        False, aliases=("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
    )
    """false: `save_16bit_model` writes nothing at stage 3. true or absent: it writes the full weights."""
    zero_hpz_partition_size: Positive = honoured(1)
    """Number of ranks over which backward all-gathers stage-3 parameters from a secondary shard (usually inside a
    host); 1: no secondary shard."""
    mics_shard_size: Annotated[Int, AfterValidator(_off_or_positive)] = honoured(-1)
    """Number of ranks over which all states are sharded; other groups of that size hold replicas. -1: shard over all
    data ranks."""
    unit_merge_threshold: Count = honoured(0, windlass_only=True)
    """Number of elements below which neighbouring units (parameters that are unsharded together) are merged; 0:
    never."""
    blocks: Names | None = honoured(None, windlass_only=True)
    """Module classes or dotted module names that are unsharded as one block; null: detect repeated blocks."""

    use_multi_rank_bucket_allreduce: bool = accepted(
        True, "a bucket is always reduced in one collective, whichever ranks own its parts"
    )
    compute_grad_norm: bool = accepted(True, "the norm is part of a reduction that is always needed")
    elastic_checkpoint: bool = accepted(
        False, "an old switch of the file layout; files of windlass contain ranges of named tensors in any case"
    )
    cpu_offload_use_pin_memory: bool | None = accepted(
        None, "DeepSpeed ignores the value; offload sections have keys of their own"
    )
    stage3_module_granularity_threshold: Count = accepted(
        0,
        "units are found automatically; unit_merge_threshold and blocks control them",
        aliases=("module_granularity_threshold",),
    )
    stage3_use_all_reduce_for_fetch_params: bool = accepted(
        False, "the transport chooses the collective", aliases=("use_all_reduce_for_fetch_params",)
    )
    stage3_allgather_sequential: bool = accepted(
        False, "all-gathers always start in one order", aliases=("allgather_sequential",)
    )
    parameter_alignment: bool = accepted(False, "a unit's layout is always aligned")
    memory_efficient_linear: bool = accepted(True, "autograd never saves a weight that is resharded")
    pipeline_loading_checkpoint: bool = accepted(False, "the overlap of loading and reading affects only speed")
    override_module_apply: bool = accepted(True, "belongs to patched constructors, which do not exist here")
    log_trace_cache_warnings: bool = accepted(False, "there is no trace cache that could warn")
    enable_sanity_checks: bool = accepted(False, "the important checks are always on")
    save_muon_momentum_buffer_in_memory: bool = accepted(
        False, "optimizer states have one tier, whatever the optimizer"
    )
    mics_hierarchical_params_gather: bool = accepted(False, "the transport chooses how an all-gather crosses hosts")
    grad_hooks: bool = accepted(
        True, "gradients are reduced when they arrive or at the accumulation boundary, depending on the stage"
    )

    load_from_fp32_weights: bool = honoured(True)
    """false: `load_checkpoint` sets the master weights from the 16-bit parameters instead of the saved fp32 weights."""
    legacy_stage1: bool = refused(False, "retired: one path serves all stages; write false")
    zero_quantized_weights: bool = honoured(False)
    """All-gather stage-3 parameters in fewer bits (ZeRO++ qwZ)."""
    zero_quantized_nontrainable_weights: bool = honoured(False)
    """All-gather frozen stage-3 parameters in fewer bits, such as the base weights under LoRA."""
    zero_quantized_gradients: bool = honoured(False)
    """Reduce stage-3 gradients in fewer bits, inside a node and then across nodes (ZeRO++ qgZ). A node is
    zero_hpz_partition_size ranks if that is above 1, else the ranks of a host."""
    zeropp_loco_param: LocoConfig | None = honoured(None)
    """Error feedback of quantized gradients (LoCo); null: no error feedback."""
    zero_quantized_weights_codec: QuantizingCodec = honoured("int8", windlass_only=True)
    """Codec of quantized all-gathers: int8, int4, fp8, bf16, identity, or a name that the script registered with
    windlass.comm.codec.register_codec."""
    zero_quantized_gradients_codec: QuantizingCodec = honoured("int8", windlass_only=True)
    """Codec of quantized gradients inside a node, with the choices of zero_quantized_weights_codec."""
    zero_quantized_gradients_codec_across: QuantizingCodec = honoured("int4", windlass_only=True)
    """Codec of quantized gradients across nodes, with the choices of zero_quantized_weights_codec."""
    cpu_offload: bool | None = honoured(None)
    """Older spelling of `offload_optimizer: {"device": "cpu"}`."""
    cpu_offload_param: bool | None = honoured(None)
    """Older spelling of `offload_param: {"device": "cpu"}`."""
    offload_param: OffloadParam | None = honoured(None)
    """Tier of the sharded parameters."""
    offload_optimizer: OffloadOptimizer | None = honoured(None)
    """Tier of master weights and optimizer states."""
    zenflow: ZenFlowConfig | None = refused(None, ZenFlowConfig.refusal)
    leaf_module: LeafModuleConfig = accepted(LeafModuleConfig, _LEAF_REASON)

    @property
    def overlap_comm_enabled(self) -> bool:
        """`overlap_comm` with its default filled in."""
        return True if self.overlap_comm is None else self.overlap_comm
