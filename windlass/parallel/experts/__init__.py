"""Mixture of experts, over ranks or not. Reading order: choice, order, capacity, losses, balance, gate; grouped,
dispatch, volume; families, mlp, copied, separate, layer; stacked, apply."""

from windlass.parallel.experts.apply_expert_parallel import (
    ExpertLayerShard,
    ExpertParallelPlan,
    apply_expert_parallel,
    expert_parameters,
    get_requested_ep_size,
)
from windlass.parallel.experts.expert_modules import ExpertModuleSpec, register_experts
from windlass.parallel.experts.mixture_of_experts import MixtureOfExperts
from windlass.parallel.experts.router_bias import (
    RouterBias,
    enable_router_bias_updates,
    find_router_biases,
    is_router_bias,
    update_biases,
    update_router_biases,
)
from windlass.parallel.experts.stacked_mlp import StackedMLP

__all__ = [
    "RouterBias",
    "ExpertModuleSpec",
    "ExpertLayerShard",
    "MixtureOfExperts",
    "ExpertParallelPlan",
    "StackedMLP",
    "apply_expert_parallel",
    "get_requested_ep_size",
    "find_router_biases",
    "expert_parameters",
    "is_router_bias",
    "update_biases",
    "register_experts",
    "update_router_biases",
    "enable_router_bias_updates",
]
