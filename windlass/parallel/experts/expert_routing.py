"""Which experts a router chooses for each token, and how much each of them counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from windlass.base.errors import ConfigError

ScoreFunction = Literal["softmax", "sigmoid"]
GateNoise = Literal["RSample", "Jitter"]
JITTER = 1e-2  # as Switch Transformer (arXiv:2101.03961, 2.2)


@dataclass(frozen=True)
class RoutingRule:
    """How experts are chosen.

    Attributes:
        experts: how many there are.
        k: how many a token gets.
        score: of an expert, from its logit: a softmax over the experts, or each logit's sigmoid (DeepSeek-V3,
            arXiv:2412.19437, eq. 15).
        noise: "RSample" adds Gumbel noise to the logits that are compared, so that experts are drawn by their
            probability, "Jitter" multiplies the router's input by 1 +- 0.01 (Switch Transformer); in training only.
        sample_second: of two experts, draw the second by its probability among the others (GShard,
            arXiv:2006.16668, 2.2), in training only.
        groups, groups_kept: experts lie in so many equal groups, and a token's are chosen among those of its
            `groups_kept` best: by their best expert (DeepSeek-V2, arXiv:2405.04434, 2.2.2), with sigmoid scores by
            the sum of their two best (DeepSeek-V3).
        normalize: the weights of a token's experts add up to 1. None: if it has several.
        scale: weights are multiplied by it.

    Raises:
        ConfigError: numbers that don't go together.
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
                f"k = {self.k} of {self.num_experts} experts: a token has at least 1, and at most all of them"
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
                f"{self.num_experts} experts can't lie in {self.num_expert_groups} equal groups of which {self.num_limited_groups} are kept"
            )
        if self.k > self.num_experts // self.num_expert_groups * self.num_limited_groups:
            raise ConfigError(
                f"k = {self.k} experts of a token can't come from {self.num_limited_groups} groups of "
                f"{self.num_experts // self.num_expert_groups}"
            )

    @property
    def normalizes_weights(self) -> bool:
        """Whether the weights of a token's experts add up to 1."""
        return self.k > 1 if self.normalize_weights is None else self.normalize_weights


def compute_router_scores(logits: torch.Tensor, routing_rule: RoutingRule) -> torch.Tensor:
    """`[tokens, experts]`, between 0 and 1."""
    return logits.sigmoid() if routing_rule.score_function == "sigmoid" else functional.softmax(logits, dim=-1)


def choose_experts(
    logits: torch.Tensor,
    scores: torch.Tensor,
    routing_rule: RoutingRule,
    *,
    bias: torch.Tensor | None = None,
    training: bool = True,
) -> torch.Tensor:
    """`[tokens, k]`, the experts of each token, the best first.

    Args:
        logits: `[tokens, experts]`.
        scores: of these.
        bias: `[experts]`, added to the scores that are compared, and to nothing else (arXiv:2408.15664).
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
    """`[tokens, k]`, what each chosen expert's output is multiplied by: its score, 0 where a slot is not used.

    Args:
        scores: `[tokens, experts]`.
        index: `[tokens, k]`; `experts` in a slot that is not used. The others share what a dropped one leaves.
    """
    used = index < routing_rule.num_experts
    weights = scores.gather(1, index.clamp(max=routing_rule.num_experts - 1)) * used
    if routing_rule.normalizes_weights:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
    return weights * routing_rule.routed_scaling_factor if routing_rule.routed_scaling_factor != 1.0 else weights


def jitter_input(tokens: torch.Tensor) -> torch.Tensor:
    """A router's input, each element times a random number between 0.99 and 1.01."""
    return tokens * torch.empty_like(tokens).uniform_(1.0 - JITTER, 1.0 + JITTER)


def gumbel_like(logits: torch.Tensor) -> torch.Tensor:
    """Noise that turns the largest logit into a draw from their softmax."""
    return -torch.empty_like(logits).exponential_().log()


def _mask_dropped_groups(compared: torch.Tensor, routing_rule: RoutingRule) -> torch.Tensor:
    """`compared`, and -inf for the experts of groups that a token does not keep."""
    each = compared.view(compared.shape[0], routing_rule.num_expert_groups, -1)  # [tokens, groups, experts of one]
    best = min(2, each.shape[-1]) if routing_rule.score_function == "sigmoid" else 1
    kept = each.topk(best, dim=-1).values.sum(-1).topk(routing_rule.num_limited_groups, dim=-1).indices
    lost = torch.ones_like(each[..., 0], dtype=torch.bool).scatter(1, kept, False)
    return each.masked_fill(lost[..., None], float("-inf")).view_as(compared)


def _sample_second_expert(logits: torch.Tensor, compared: torch.Tensor) -> torch.Tensor:
    first = compared.argmax(-1, keepdim=True)
    others = logits + gumbel_like(logits)
    others = others.masked_fill(compared.eq(float("-inf")), float("-inf")).scatter(1, first, float("-inf"))
    return torch.cat([first, others.argmax(-1, keepdim=True)], dim=-1)
