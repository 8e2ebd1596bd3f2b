"""Parallel axes beside the data axes: pipeline, tensor, expert."""

from __future__ import annotations

from typing import Any, Literal

from windlass.config.section import Count, Float, Int, Names, Positive, Section
from windlass.config.verdict import refused


class Pipeline(Section):
    """Options of a pipeline module."""

    refusal = "not yet built: pipeline parallelism; delete the section"

    stages: Int | str = refused("auto", "")
    partition: str = refused("best", "")
    seed_layers: bool = refused(False, "")
    activation_checkpoint_interval: Count = refused(0, "")
    pipe_partitioned: bool = refused(True, "")
    grad_partitioned: bool = refused(True, "")
    use_reentrant: bool = refused(True, "")


class TensorParallelGroup(Section):
    """Size and group of the tensor-parallel axis."""

    switch = "tp_size"

    tp_size: Positive = refused(1, "")
    tp_grain_size: Positive = refused(1, "")
    mpu: Any = refused(None, "")
    tp_group: Any = refused(None, "")


class LayerSpec(Section):
    """How the layers that match some patterns are cut."""

    patterns: Names = refused(list, "")
    partition_type: Literal["row", "column", "skip"] = refused("column", "")
    shape: list[Any] | None = refused(None, "")
    partition_dim: Int | None = refused(None, "")
    model_types: Names | None = refused(None, "")
    gather_output: bool = refused(False, "")
    grad_allreduce: bool = refused(False, "")


class PartitionConfig(Section):
    """The user's own cutting rules."""

    use_default_specs: bool = refused(True, "")
    layer_specs: list[LayerSpec] = refused(list, "")


class TensorParallel(Section):
    """Matrices cut over ranks."""

    refusal = "not yet built: tensor parallelism; write 0 or 1, or delete the section"

    dtype: Any = refused("torch.float16", "")
    autotp_size: Count = refused(0, "")
    tp_overlap_comm: bool = refused(False, "")
    vocab_parallel_lm_head: bool | None = refused(None, "")
    vocab_parallel_ce_backend: Literal["torch", "liger"] = refused("torch", "")
    tp: TensorParallelGroup = refused(TensorParallelGroup, "", also=("tensor_parallel",))
    injection_policy_tuple: list[Any] | None = refused(None, "")
    partition_config: PartitionConfig | None = refused(None, "")
    preset_model: Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"] | None = refused(
        None, ""
    )
    keep_module_on_host: bool = refused(False, "")
    kernel_inject: bool = refused(False, "", also=("replace_with_kernel_inject",))

    def asked_for(self) -> str | None:
        if self.autotp_size > 1:
            return "autotp_size"
        return "tp.tp_size" if self.tp.tp_size > 1 else None


class ExpertParallel(Section):
    """Experts of a mixture-of-experts model spread over ranks."""

    refusal = "not yet built: expert parallelism; write false"
    switch = "enabled"

    enabled: bool = refused(False, "")
    autoep_size: Positive = refused(1, "")
    expert_tensor_parallel_size: Positive = refused(1, "")
    validate_folding_routing: bool = refused(False, "")
    async_split_plan: bool = refused(False, "")
    preset_model: Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3"] | None = refused(
        None, ""
    )
    moe_layer_pattern: str | None = refused(None, "")
    expert_pattern: str | None = refused(None, "")
    router_pattern: str | None = refused(None, "")
    use_grouped_mm: bool = refused(True, "")
    disable_triton_grouped_mm: bool = refused(False, "")
    route_norm: bool | None = refused(None, "")
    route_scale: Float = refused(1.0, "")
    score_apply: Literal["auto", "pre", "post"] = refused("auto", "")
    combine_impl: Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"] = refused("auto", "")
    row_weighting_impl: Literal["auto", "eager", "fused"] = refused("auto", "")
    gate_up_impl: Literal["separate", "fused"] = refused("separate", "")
    comm_backend: Literal["comm", "deepep"] = refused("comm", "")
    comm_num_sm: Positive = refused(12, "")
    comm_qp_margin: Count = refused(4, "")
    comm_max_tokens_per_rank: Count = refused(0, "")
    num_expert_groups: Positive | None = refused(None, "")
    num_limited_groups: Positive | None = refused(None, "")
    score_func: Literal["auto", "softmax", "sigmoid"] = refused("auto", "")
    top_k: Positive | Literal["auto"] = refused("auto", "")
    load_balance_coeff: None = refused(None, "")
    routed_scaling_factor: Float | Literal["auto"] = refused("auto", "")
    expert_w1: str | None = refused(None, "")
    expert_w2: str | None = refused(None, "")
    expert_w3: str | None = refused(None, "")
    num_experts_attr: str | None = refused(None, "")
    top_k_attr: str | None = refused(None, "")
    has_shared_experts: bool | None = refused(None, "")
    shared_experts_pattern: str | None = refused(None, "")
    shared_experts_gate_pattern: str | None = refused(None, "")
    expert_activation: str | None = refused(None, "")
