"""The `zero_optimization` section: the stage, and how its traffic is cut up."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from windlass.config.config_section import NUMBER, ConfigSection, Count, Int, Names, Positive
from windlass.config.key_status import accepted, honoured, refused
from windlass.config.offload_section import OffloadOptimizer, OffloadParam, ZenFlowConfig

NO_MODEL_LIMIT = 2**63 - 1
_LEAF_REASON = (
    "what runs is gathered, and ranks may run different modules; zero_optimization.blocks chooses what is one"
)


def _off_or_positive(value: int) -> int:
    if value != -1 and value < 1:
        raise PydanticCustomError("shard_size", "input should be -1 (off) or a number of ranks >= 1")
    return value


class LeafModuleConfig(ConfigSection):
    """Modules whose whole subtree DeepSpeed gathers at once, since their ranks may run different parts of it."""

    classes: Names = accepted(list, _LEAF_REASON)
    names: Names = accepted(list, _LEAF_REASON)
    name_suffixes: Names = accepted(list, _LEAF_REASON)


class ZeroConfig(ConfigSection):
    """What is cut over the ranks, and in which portions it travels; sizes are in elements."""

    stage: Annotated[int, Field(ge=0, le=3), NUMBER] = honoured(0)
    """0: nothing is cut; 1: master weights and optimizer states; 2: gradients too; 3: parameters too."""
    reduce_bucket_size: Positive = honoured(500_000_000)
    """At most so many gradient elements are reduced in one collective."""
    allgather_bucket_size: Positive = honoured(500_000_000)
    """At most so many parameter elements are gathered in one collective after a step."""
    reduce_scatter: bool = honoured(True)
    """Send each rank only its cut of the gradients; false: reduce the whole and keep the cut."""
    allgather_partitions: bool = honoured(True)
    """Gather updated cuts in one all-gather; false: one broadcast a rank."""
    contiguous_gradients: bool = honoured(True)
    """Gradients are born in one flat buffer; false: they are copied there before they are reduced."""
    overlap_comm: bool | None = honoured(None)
    """Communicate while computing; on when absent."""
    round_robin_gradients: bool = honoured(False)
    """Deal the order in which cuts are reduced over the ranks, so that none waits for the same peer."""
    sub_group_size: Positive = honoured(1_000_000_000)
    """The step updates at most so many elements at once."""
    ignore_unused_parameters: bool = honoured(True)
    """A parameter without gradient is left alone; false: it is an error that names the parameter."""
    stage3_prefetch_bucket_size: Count = honoured(50_000_000, aliases=("prefetch_bucket_size",))
    """At most so many elements are gathered ahead of their use."""
    stage3_param_persistence_threshold: Count = honoured(100_000, aliases=("param_persistence_threshold",))
    """Parameters smaller than this are never released."""
    stage3_model_persistence_threshold: Count = honoured(NO_MODEL_LIMIT, aliases=("model_persistence_threshold",))
    """At most so many elements in all are never released."""
    stage3_max_live_parameters: Count = honoured(1_000_000_000, aliases=("max_live_parameters",))
    """At most so many gathered elements exist at once."""
    stage3_max_reuse_distance: Count = honoured(1_000_000_000, aliases=("max_reuse_distance",))
    """Parameters used again within so many elements are kept."""
    stage3_gather_16bit_weights_on_model_save: bool = honoured(
        False, aliases=("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
    )
    """An explicit false: `save_16bit_model` writes nothing at stage 3; left out or true: whole weights."""
    zero_hpz_partition_size: Positive = honoured(1)
    """Ranks over which backward gathers stage-3 parameters again (a second cut inside a host); 1 is off."""
    mics_shard_size: Annotated[Int, AfterValidator(_off_or_positive)] = honoured(-1)
    """Ranks over which everything is cut; groups of that size hold replicas (`dp_shard`); -1 is all of them."""
    unit_merge_threshold: Count = honoured(0, windlass_only=True)
    """Neighbouring units smaller than this many elements are merged into one; 0 is never."""
    blocks: Names | None = honoured(None, windlass_only=True)
    """Module classes or dotted module names that are gathered as one; null finds the repeated blocks by itself."""

    use_multi_rank_bucket_allreduce: bool = accepted(
        True, "a bucket always travels in one collective, whichever ranks own its parts"
    )
    compute_grad_norm: bool = accepted(True, "the norm rides in a reduction that is made in any case")
    elastic_checkpoint: bool = accepted(
        False, "an old switch of the file layout; files here hold ranges of named tensors, whatever wrote them"
    )
    cpu_offload_use_pin_memory: bool | None = accepted(
        None, "DeepSpeed drops the value; offload sections have their own"
    )
    stage3_module_granularity_threshold: Count = accepted(
        0,
        "units are found automatically; unit_merge_threshold and blocks steer them",
        aliases=("module_granularity_threshold",),
    )
    stage3_use_all_reduce_for_fetch_params: bool = accepted(
        False, "which collective gathers is the transport's choice", aliases=("use_all_reduce_for_fetch_params",)
    )
    stage3_allgather_sequential: bool = accepted(
        False, "gathers are started in one order in any case", aliases=("allgather_sequential",)
    )
    parameter_alignment: bool = accepted(False, "a unit's layout is aligned in any case")
    memory_efficient_linear: bool = accepted(True, "a released weight is never saved by autograd in the first place")
    pipeline_loading_checkpoint: bool = accepted(False, "how loading overlaps with reading is a speed detail")
    override_module_apply: bool = accepted(True, "belongs to patched constructors, which do not exist here")
    log_trace_cache_warnings: bool = accepted(False, "there is no trace cache that could warn")
    enable_sanity_checks: bool = accepted(False, "the checks that matter are always on")
    save_muon_momentum_buffer_in_memory: bool = accepted(False, "optimizer state has one home, whatever the optimizer")
    mics_hierarchical_params_gather: bool = accepted(False, "how a gather crosses hosts is the transport's choice")
    grad_hooks: bool = accepted(True, "gradients are reduced when they arrive or at the boundary, as the stage demands")

    load_from_fp32_weights: bool = honoured(True)
    """false: `load_checkpoint` sets master weights to the 16-bit parameters, not to the saved fp32 weights."""
    legacy_stage1: bool = refused(False, "retired: one path serves all stages; write false")
    zero_quantized_weights: bool = refused(False, "not yet built: quantized gathers; write false")
    zero_quantized_nontrainable_weights: bool = refused(False, "not yet built: quantized gathers; write false")
    zero_quantized_gradients: bool = refused(False, "not yet built: quantized reductions; write false")
    zeropp_loco_param: dict[str, Any] | None = refused(None, "not yet built: LoCo error feedback; delete the key")
    cpu_offload: bool | None = honoured(None)
    """An older spelling of `offload_optimizer: {"device": "cpu"}`."""
    cpu_offload_param: bool | None = honoured(None)
    """An older spelling of `offload_param: {"device": "cpu"}`."""
    offload_param: OffloadParam | None = honoured(None)
    """Where parameters live between uses."""
    offload_optimizer: OffloadOptimizer | None = honoured(None)
    """Where master weights and optimizer states live."""
    zenflow: ZenFlowConfig | None = refused(None, ZenFlowConfig.refusal)
    leaf_module: LeafModuleConfig = accepted(LeafModuleConfig, _LEAF_REASON)

    @property
    def overlap_comm_enabled(self) -> bool:
        """`overlap_comm` with its default filled in."""
        return True if self.overlap_comm is None else self.overlap_comm
