"""Losses that keep routers balanced and their logits small."""

from __future__ import annotations

import torch


def load_balancing_loss(probabilities: torch.Tensor, tokens_per_expert: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Experts times the sum over them of mean probability x fraction of choices: 1 when both are even.

    GShard (arXiv:2006.16668, algorithm 1), Switch Transformer (arXiv:2101.03961, eq. 4).

    Args:
        probabilities: `[tokens, experts]`, each row adds up to 1.
        chosen: `[experts]`, how often each was chosen.
        slots: how many choices there were, with those that nobody used.
    """
    fraction = tokens_per_expert.to(probabilities.dtype) / max(num_slots, 1)
    mean = probabilities.sum(0) / max(probabilities.shape[0], 1)
    return (mean * fraction).sum() * probabilities.shape[1]


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """The mean squared log-sum-exp of `[tokens, experts]`: large logits cost (ST-MoE, arXiv:2202.08906, eq. 5)."""
    return logits.logsumexp(-1).square().sum() / max(logits.shape[0], 1)


def normalize_scores(scores: torch.Tensor) -> torch.Tensor:
    """Scores of each token made to add up to 1 (DeepSeek-V3, arXiv:2412.19437, eq. 19)."""
    return scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).eps)
