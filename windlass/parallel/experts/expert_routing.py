"""Choice of the experts of each token, and of the weights by which their outputs are added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from windlass.base.errors import ConfigError

ScoreFunction = Literal["softmax", "sigmoid"]
GateNoise = Literal["RSample", "Jitter"]
JITTER = 1e-2  # as in Switch Transformer (arXiv:2101.03961)


@dataclass(frozen=True)
class RoutingRule:
    """Rule by which experts are chosen.

    Attributes:
        num_experts: number of experts.
        k: experts per token.
        score_function: score of an expert from its logit: a softmax over the experts, or each logit's sigmoid
            (DeepSeek-V3, arXiv:2412.19437, eq. 15).
        noise: "RSample" adds Gumbel noise to the logits before the best experts are chosen, so that experts are sampled
            by their probability; "Jitter" multiplies the router's input by a factor in 1 +- 0.01 (Switch Transformer).
            Applied in training only.
        sample_second_expert: with k = 2, sample the second expert by its probability among the others (GShard,
            arXiv:2006.16668, 2.2). Applied in training only, and not with "RSample".
        num_expert_groups, num_limited_groups: experts form `num_expert_groups` equal groups, and a token's experts are
            chosen from its `num_limited_groups` best groups. Groups are ranked by the score of their best expert
            (DeepSeek-V2, arXiv:2405.04434, 2.2.2), with sigmoid scores by the sum of their two best (DeepSeek-V3).
        normalize_weights: True to normalize the weights of a token's experts to sum to 1. None: True if k > 1.
        routed_scaling_factor: factor by which the weights are then multiplied.

    Raises:
        ConfigError: the values are inconsistent.
    """

    num_experts: int
    k: int = 1
    score_function: ScoreFunction = "softmax"
    noise: GateNoise | None = None
    sample_second_expert: bool = False
    num_expert_groups: int = 1
    num_limited_groups: int = 1
    normalize_weights: bool | None = None
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.num_experts < 1 or not 1 <= self.k <= self.num_experts:
            raise ConfigError(
                f"k = {self.k} of {self.num_experts} experts is out of range; write a number from 1 to the number of "
                "experts"
            )
        if self.score_function not in ("softmax", "sigmoid"):
            raise ConfigError(f"score = {self.score_function!r}; write 'softmax' or 'sigmoid'")
        if self.noise not in (None, "RSample", "Jitter"):
            raise ConfigError(f"noisy_gate_policy = {self.noise!r}; write 'RSample', 'Jitter' or None")
        if (
            self.num_expert_groups < 1
            or self.num_experts % self.num_expert_groups
            or not 1 <= self.num_limited_groups <= self.num_expert_groups
        ):
            raise ConfigError(
                f"{self.num_experts} experts can't form {self.num_expert_groups} equal groups of which "
                f"{self.num_limited_groups} are kept; the number of groups must divide the number of experts"
            )
        if self.k > self.num_experts // self.num_expert_groups * self.num_limited_groups:
            raise ConfigError(
                f"k = {self.k} experts of a token can't be chosen from {self.num_limited_groups} groups of "
                f"{self.num_experts // self.num_expert_groups}; lower k, or raise num_limited_groups"
            )

    @property
    def normalizes_weights(self) -> bool:
        """True if the weights of a token's experts are normalized, with the default applied."""
        return self.k > 1 if self.normalize_weights is None else self.normalize_weights


def compute_router_scores(logits: torch.Tensor, routing_rule: RoutingRule) -> torch.Tensor:
    """Compute the scores, between 0 and 1, from the logits. Both are `[tokens, experts]`."""
    return logits.sigmoid() if routing_rule.score_function == "sigmoid" else functional.softmax(logits, dim=-1)


def choose_experts(
    logits: torch.Tensor,
    scores: torch.Tensor,
    routing_rule: RoutingRule,
    *,
    bias: torch.Tensor | None = None,
    training: bool = True,
) -> torch.Tensor:
    """Choose the experts `[tokens, k]` of each token, the best first.

    Args:
        logits: `[tokens, experts]`.
        scores: `[tokens, experts]`, computed from `logits`.
        bias: `[experts]`, added to the scores to choose experts, but not to the weights (arXiv:2408.15664).
        training: if False, nothing is sampled.
    """
    with torch.no_grad():
        compared = scores if bias is None else scores + bias
        drawn = training and routing_rule.noise == "RSample"
        if drawn:
            compared = (logits if bias is None else compared.clamp(min=1e-20).log()) + gumbel_like(logits)
        if routing_rule.num_limited_groups < routing_rule.num_expert_groups:
            compared = _mask_dropped_groups(compared, routing_rule)
        if routing_rule.k == 2 and routing_rule.sample_second_expert and training and not drawn:
            return _sample_second_expert(logits, compared)
        return compared.topk(routing_rule.k, dim=-1).indices


def compute_expert_weights(scores: torch.Tensor, index: torch.Tensor, routing_rule: RoutingRule) -> torch.Tensor:
    """Compute the weights `[tokens, k]` of the chosen experts' outputs: the scores, and 0 for an unused slot.

    Args:
        scores: `[tokens, experts]`.
        index: `[tokens, k]`; `num_experts` in an unused slot. Normalization distributes the weight of an unused slot
            over the other slots.
    """
    used = index < routing_rule.num_experts
    weights = scores.gather(1, index.clamp(max=routing_rule.num_experts - 1)) * used
    if routing_rule.normalizes_weights:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
    return weights * routing_rule.routed_scaling_factor if routing_rule.routed_scaling_factor != 1.0 else weights


def jitter_input(tokens: torch.Tensor) -> torch.Tensor:
    """Multiply each element of a router's input by a random factor between 0.99 and 1.01."""
    return tokens * torch.empty_like(tokens).uniform_(1.0 - JITTER, 1.0 + JITTER)


def gumbel_like(logits: torch.Tensor) -> torch.Tensor:
    """Return Gumbel noise. The argmax of logits plus noise is a sample from their softmax."""
    return -torch.empty_like(logits).exponential_().log()


def _mask_dropped_groups(compared: torch.Tensor, routing_rule: RoutingRule) -> torch.Tensor:
    """Set the scores of the experts outside a token's `num_limited_groups` best groups to -inf."""
    each = compared.view(compared.shape[0], routing_rule.num_expert_groups, -1)  # [tokens, groups, experts of a group]
    best = min(2, each.shape[-1]) if routing_rule.score_function == "sigmoid" else 1
    kept = each.topk(best, dim=-1).values.sum(-1).topk(routing_rule.num_limited_groups, dim=-1).indices
    lost = torch.ones_like(each[..., 0], dtype=torch.bool).scatter(1, kept, False)
    return each.masked_fill(lost[..., None], float("-inf")).view_as(compared)


def _sample_second_expert(logits: torch.Tensor, compared: torch.Tensor) -> torch.Tensor:
    first = compared.argmax(-1, keepdim=True)
    others = logits + gumbel_like(logits)
    others = others.masked_fill(compared.eq(float("-inf")), float("-inf")).scatter(1, first, float("-inf"))
    return torch.cat([first, others.argmax(-1, keepdim=True)], dim=-1)
