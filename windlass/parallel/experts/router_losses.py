"""Losses that balance routers and keep their logits small."""

from __future__ import annotations

import torch


def load_balancing_loss(probabilities: torch.Tensor, tokens_per_expert: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Compute the number of experts times the sum over experts of (mean probability) x (fraction of choices). It is 1
    if both are even.

    Source: GShard (arXiv:2006.16668, algorithm 1), Switch Transformer (arXiv:2101.03961, eq. 4).

    Args:
        probabilities: `[tokens, experts]`; each row sums to 1.
        tokens_per_expert: `[experts]`, number of choices of each expert.
        num_slots: total number of slots, including unused ones.
    """
    fraction = tokens_per_expert.to(probabilities.dtype) / max(num_slots, 1)
    mean = probabilities.sum(0) / max(probabilities.shape[0], 1)
    return (mean * fraction).sum() * probabilities.shape[1]


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Compute the mean squared log-sum-exp of `[tokens, experts]`, which penalizes large logits (ST-MoE,
    arXiv:2202.08906, eq. 5).
    """
    return logits.logsumexp(-1).square().sum() / max(logits.shape[0], 1)


def normalize_scores(scores: torch.Tensor) -> torch.Tensor:
    """Normalize the scores of each token to sum to 1 (DeepSeek-V3, arXiv:2412.19437, eq. 19)."""
    return scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).eps)
