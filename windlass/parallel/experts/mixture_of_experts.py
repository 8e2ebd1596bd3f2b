"""Mixture-of-experts layer for users' own models."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import nn
from torch.nn import functional

from windlass.base.errors import ConfigError
from windlass.base.log import logger
from windlass.parallel.experts.expert_capacity import CapacityPriority
from windlass.parallel.experts.expert_list import Experts
from windlass.parallel.experts.expert_routing import RoutingRule, ScoreFunction
from windlass.parallel.experts.stacked_mlp import StackedMLP
from windlass.parallel.experts.top_k_gate import CapacityLimit, TopKGate


class MixtureOfExperts(nn.Module):
    """Mixture-of-experts layer: each token is processed by `k` experts (copies of one module, or one `StackedMLP`).

    The signature is that of `deepspeed.moe.layer.MoE`, with more keyword arguments.

    The layer is built with all experts; `apply_expert_parallel` drops the experts of other ranks. Names in the state
    dict are DeepSpeed's.

    Args:
        hidden_size: width of a token, in and out.
        expert: the module to copy; it maps `[rows, hidden_size]` to the same shape (`Experts`). A `StackedMLP`, which
            contains all experts, is used as it is.
        num_experts: number of experts.
        ep_size: number of ranks over which to distribute the experts; 1: the size of the ep axis.
        k: experts per token.
        capacity_factor, eval_capacity_factor, min_capacity: limit of tokens per expert and rank
            (`compute_expert_capacity`).
        use_residual: also run `expert` itself on every token, and weigh both outputs by a learned softmax (PR-MoE,
            arXiv:2201.05596).
        noisy_gate_policy: None, "RSample" or "Jitter" (`RoutingRule.noise`).
        drop_tokens: drop tokens over capacity. False: experts take all tokens that chose them.
        use_rts: with `k` = 1, drop a random subset of an expert's tokens when it is over capacity; False: drop the last
            ones. With `k` = 2 the last ones are dropped, second choices first; with larger `k`, those of lowest score.
            This is DeepSpeed's behaviour.
        use_tutel: no effect; rows are always sorted by expert.
        enable_expert_tensor_parallelism: tensor parallelism also shards each expert. False: each rank along tp holds
            full experts, which all these ranks run on the same tokens. The residual expert and the shared expert are
            sharded in either case. If True, experts that are distributed over ep ranks must be a `StackedMLP`.
        top2_2nd_expert_sampling: with `k` = 2, sample the second expert, in training only (DeepSpeed also samples in
            evaluation). No effect if `expert_bias_update_rate` is set.
        score_function, num_expert_groups, num_limited_groups, normalize_weights, routed_scaling_factor: see
            `RoutingRule`.
        z_loss_weight: weight of the z-loss in the returned loss, where the balance loss has weight 1.
        expert_bias_update_rate: step by which `update_router_biases` moves each expert's bias against its load; 0: no
            bias.
        shared_expert: a module that processes every token; its output is added.
        capacity_priority: order in which tokens are accepted up to capacity; None: the order that `k` and `use_rts`
            imply.

    Raises:
        ConfigError: the values are inconsistent.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
        *,
        score_function: ScoreFunction = "softmax",
        num_expert_groups: int = 1,
        num_limited_groups: int = 1,
        normalize_weights: bool | None = None,
        routed_scaling_factor: float = 1.0,
        z_loss_weight: float = 0.0,
        expert_bias_update_rate: float = 0.0,
        shared_expert: nn.Module | None = None,
        capacity_priority: CapacityPriority | None = None,
    ) -> None:
        super().__init__()
        if ep_size < 1 or num_experts < ep_size:
            raise ConfigError(
                f"{num_experts} experts can't be distributed over ep_size = {ep_size} ranks, each of which needs at "
                f"least one; set ep_size to at most {num_experts}"
            )
        if isinstance(expert, StackedMLP) and (use_residual or expert.num_experts != num_experts):
            raise ConfigError(
                f"a StackedMLP of {expert.num_experts} experts can't be {num_experts} experts"
                f"{' and the residual one' if use_residual else ''}; pass equal numbers, and use_residual = False"
            )
        if use_tutel:
            logger.info("MoE: use_tutel has no effect: rows are always sorted by expert")
        rule = RoutingRule(
            num_experts,
            k,
            score_function,
            None if noisy_gate_policy == "None" else noisy_gate_policy,  # type: ignore[arg-type]
            sample_second_expert=top2_2nd_expert_sampling and not expert_bias_update_rate,
            num_expert_groups=num_expert_groups,
            num_limited_groups=num_limited_groups,
            normalize_weights=normalize_weights,
            routed_scaling_factor=routed_scaling_factor,
        )
        if capacity_priority not in (None, *get_args(CapacityPriority)):
            known = ", ".join(get_args(CapacityPriority))
            raise ConfigError(f"capacity_priority = {capacity_priority!r}; write one of {known}, or None")
        order = capacity_priority or (
            "position" if k == 2 or (k == 1 and not use_rts) else "random" if k == 1 else "score"
        )
        limit = CapacityLimit(capacity_factor, eval_capacity_factor, min_capacity, order) if drop_tokens else None
        gate = TopKGate(
            hidden_size, rule, limit, z_loss_weight=z_loss_weight, expert_bias_update_rate=expert_bias_update_rate
        )
        self.hidden_size, self.num_experts, self.ep_size, self.k = hidden_size, num_experts, ep_size, k
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        experts = expert if isinstance(expert, StackedMLP) else Experts(expert, num_experts)
        self.deepspeed_moe = nn.ModuleDict({"gate": gate, "experts": experts})
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)
        self.shared_expert = shared_expert

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run tokens through their experts. Collective along the expert axis.

        Args:
            hidden_states: `[..., hidden_size]`.
            used_token: `[...]`, 0 for tokens without an expert, whose output is 0 (except from residual and shared
                experts).

        Returns:
            The output, of the shape of `hidden_states`; the load-balancing loss of this rank's tokens, to be added to
            the model's loss with a weight of about 0.01; and `[num_experts]`, the number of this rank's tokens that
            chose each expert.
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        gate: Any = self.deepspeed_moe["gate"]
        experts = self.deepspeed_moe["experts"]
        routed = gate(tokens, used_token)
        dropless = gate.capacity_limit is None and used_token is None
        output = experts(tokens, routed.expert_index, routed.expert_weights, dropless=dropless).view(
            hidden_states.shape
        )
        if self.use_residual:
            share = functional.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * share[..., 0:1] + _first_output(self.mlp(hidden_states)) * share[..., 1:]
        if self.shared_expert is not None:
            output = output + _first_output(self.shared_expert(hidden_states))
        return output, routed.loss, routed.tokens_per_expert

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, k={self.k}"


def _first_output(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output
