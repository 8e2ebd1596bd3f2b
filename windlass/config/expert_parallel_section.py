"""DeepSpeed's `expert_parallel` section: experts of a mixture-of-experts model, distributed over ranks."""

from __future__ import annotations

from typing import Literal

from windlass.config.config_section import ConfigSection, Count, Float, Positive
from windlass.config.key_status import accepted, honoured, refused

_FOUND = "experts and routers are found by the classes of the model; delete it"
_ROUTER = "the model's own router and configuration determine it; delete it"
_SPEED = "it affects only speed; values are the same"
_DEEPEP = "read only with comm_backend deepep, itself refused"


class ExpertParallel(ConfigSection):
    """Distribution of the experts of a mixture-of-experts model over ranks."""

    enable_key = "enabled"

    enabled: bool = honoured(False)
    """Distribute experts over autoep_size ranks."""
    autoep_size: Positive = honoured(1)
    """Same as parallel.ep; read if `enabled` is true."""
    preset_model: Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3"] | None = accepted(
        None, "experts and routers are found by the classes of the model"
    )
    validate_folding_routing: bool = accepted(False, "the placement of ranks is always checked")
    async_split_plan: bool = accepted(False, _SPEED)
    use_grouped_mm: bool = accepted(True, _SPEED)
    disable_triton_grouped_mm: bool = accepted(False, _SPEED)
    combine_impl: Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"] = accepted("auto", _SPEED)
    row_weighting_impl: Literal["auto", "eager", "fused"] = accepted("auto", _SPEED)
    gate_up_impl: Literal["separate", "fused"] = accepted("separate", _SPEED)
    comm_num_sm: Positive = accepted(12, _DEEPEP)
    comm_qp_margin: Count = accepted(4, _DEEPEP)
    comm_max_tokens_per_rank: Count = accepted(0, _DEEPEP)

    expert_tensor_parallel_size: Positive = refused(1, "DeepSpeed accepts only 1 too; write 1")
    comm_backend: Literal["comm", "deepep"] = refused("comm", 'not built: DeepEP; write "comm"')
    moe_layer_pattern: str | None = refused(None, _FOUND)
    expert_pattern: str | None = refused(None, _FOUND)
    router_pattern: str | None = refused(None, _FOUND)
    expert_w1: str | None = refused(None, _FOUND)
    expert_w2: str | None = refused(None, _FOUND)
    expert_w3: str | None = refused(None, _FOUND)
    num_experts_attr: str | None = refused(None, _FOUND)
    top_k_attr: str | None = refused(None, _FOUND)
    has_shared_experts: bool | None = refused(None, _FOUND)
    shared_experts_pattern: str | None = refused(None, _FOUND)
    shared_experts_gate_pattern: str | None = refused(None, _FOUND)
    expert_activation: str | None = refused(None, _FOUND)
    route_norm: bool | None = refused(None, _ROUTER)
    route_scale: Float = refused(1.0, _ROUTER)
    score_apply: Literal["auto", "pre", "post"] = refused("auto", _ROUTER)
    num_expert_groups: Positive | None = refused(None, _ROUTER)
    num_limited_groups: Positive | None = refused(None, _ROUTER)
    score_func: Literal["auto", "softmax", "sigmoid"] = refused("auto", _ROUTER)
    top_k: Positive | Literal["auto"] = refused("auto", _ROUTER)
    routed_scaling_factor: Float | Literal["auto"] = refused("auto", _ROUTER)
    load_balance_coeff: None = refused(None, "DeepSpeed accepts only null too; delete it")
