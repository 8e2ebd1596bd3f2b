"""Mixture of experts, over ranks or not. Reading order: choice, order, capacity, losses, balance, gate; grouped,
dispatch, volume; families, mlp, copied, separate, layer; stacked, apply."""

from windlass.parallel.experts.apply import Layer, Plan, apply_expert_parallel, asked_ranks, expert_parameters
from windlass.parallel.experts.balance import Balance, balances_of, is_bias, move_all, update_balance, watch_balance
from windlass.parallel.experts.families import Family, register_experts
from windlass.parallel.experts.layer import MoE
from windlass.parallel.experts.mlp import StackedMLP

__all__ = [
    "Balance",
    "Family",
    "Layer",
    "MoE",
    "Plan",
    "StackedMLP",
    "apply_expert_parallel",
    "asked_ranks",
    "balances_of",
    "expert_parameters",
    "is_bias",
    "move_all",
    "register_experts",
    "update_balance",
    "watch_balance",
]
