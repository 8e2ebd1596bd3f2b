"""Mixture of experts, on one rank or sharded over the ranks of the expert axis.

Reading order: expert_routing, token_permutation, expert_capacity, router_bias, top_k_gate;
grouped_linear, expert_dispatch; expert_modules, stacked_mlp, deepcopy_on_axis, expert_list,
mixture_of_experts; stacked_experts, apply_expert_parallel.
"""

from windlass.parallel.experts.apply_expert_parallel import (
    ExpertLayerShard,
    ExpertParallelPlan,
    apply_expert_parallel,
    expert_parameters,
    get_requested_ep_size,
)
from windlass.parallel.experts.expert_list import sharded_expert_modules
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
    "sharded_expert_modules",
    "update_router_biases",
    "enable_router_bias_updates",
]
