"""Reference mixture of experts, token by token as in the papers, that tests compare the fast one with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Expert = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Words:
    """Routing options, by the argument names of `MoE`."""

    k: int = 1
    score: str = "softmax"
    noise: str | None = None
    sample_second: bool = False
    groups: int = 1
    groups_kept: int = 1
    normalize: bool | None = None
    scale: float = 1.0
    factor: float | None = None  # None: no token is dropped
    minimum: int = 0
    priority: str = "position"
    z_weight: float = 0.0


def slow_moe(
    tokens: Tensor,
    router: Tensor,
    experts: Sequence[Expert],
    words: Words,
    *,
    bias: Sequence[float] | None = None,
    used: Sequence[bool] | None = None,
) -> tuple[Tensor, Tensor, list[int]]:
    """Compute the output `[tokens, hidden]`, the loss, and how many tokens chose each expert.

    Random numbers come from torch's generator in the order and the sizes in which the fast implementation draws them.
    """
    number, count = len(tokens), len(experts)
    seen = tokens.float()
    if words.noise == "Jitter":
        seen = seen * torch.empty_like(seen).uniform_(0.99, 1.01)
    gumbel = torch.zeros(number, count)
    if words.noise == "RSample" or (words.sample_second and words.k == 2):
        gumbel = -torch.empty(number, count).exponential_().log()
    logits = [[(seen[t] * router[e].float()).sum() for e in range(count)] for t in range(number)]
    scores = [_scores(row, words) for row in logits]
    chosen = [
        _chosen(scores[t], logits[t], gumbel[t].tolist(), bias, words) if used is None or used[t] else []
        for t in range(number)
    ]
    counts = [sum(e in row for row in chosen) for e in range(count)]
    kept = _kept(chosen, scores, number, count, words)
    outputs = []
    for t in range(number):
        weights = [scores[t][e] for e in kept[t]]
        if words.normalize if words.normalize is not None else words.k > 1:
            total = sum(weights, torch.zeros(())).clamp(min=torch.finfo(torch.float32).eps)
            weights = [weight / total for weight in weights]
        output = torch.zeros_like(tokens[t])
        for e, weight in zip(kept[t], weights, strict=True):
            output = output + experts[e](tokens[t : t + 1])[0] * (weight * words.scale)
        outputs.append(output)
    return torch.stack(outputs), _loss(logits, scores, chosen, number, count, words), counts


def _scores(logits: list[Tensor], words: Words) -> list[Tensor]:
    if words.score == "sigmoid":
        return [1 / (1 + (-logit).exp()) for logit in logits]
    highest = max(logit.item() for logit in logits)
    powers = [(logit - highest).exp() for logit in logits]
    return [power / sum(powers) for power in powers]


def _chosen(
    scores: list[Tensor], logits: list[Tensor], gumbel: list[float], bias: Sequence[float] | None, words: Words
) -> list[int]:
    """Return the experts of one token, the best first."""
    count = len(scores)
    compared = [score.item() + (bias[e] if bias else 0.0) for e, score in enumerate(scores)]
    if words.noise == "RSample":
        compared = [logit.item() + noise for logit, noise in zip(logits, gumbel, strict=True)]
    size = count // words.groups
    eligible = set(range(count))
    if words.groups_kept < words.groups:
        best = 2 if words.score == "sigmoid" else 1
        worth = {g: sum(sorted(compared[g * size : (g + 1) * size], reverse=True)[:best]) for g in range(words.groups)}
        kept = sorted(worth, key=lambda g: -worth[g])[: words.groups_kept]
        eligible = {e for e in eligible if e // size in kept}
    ranked = sorted(eligible, key=lambda e: -compared[e])
    if words.sample_second and words.k == 2 and words.noise != "RSample":
        second = max((e for e in ranked[1:]), key=lambda e: logits[e].item() + gumbel[e])
        return [ranked[0], second]
    return ranked[: words.k]


def _kept(
    chosen: list[list[int]], scores: list[list[Tensor]], number: int, count: int, words: Words
) -> list[list[int]]:
    """Return the experts that each token chose, without choices beyond an expert's capacity."""
    if words.factor is None:
        return chosen
    room = max(-(-round(number * words.factor * words.k * 1000) // (count * 1000)), words.minimum)
    slots = [(t, place) for place in range(words.k) for t in range(number) if place < len(chosen[t])]
    if words.priority == "random":
        draws = torch.rand(number * words.k).tolist()
        slots.sort(key=lambda slot: draws[slot[0] * words.k + slot[1]])
    elif words.priority == "score":
        slots.sort(key=lambda slot: (-scores[slot[0]][chosen[slot[0]][slot[1]]].item(), slot[0], slot[1]))
    taken = [0] * count
    kept: list[list[int]] = [[] for _ in range(number)]
    for t, place in slots:
        expert = chosen[t][place]
        if taken[expert] < room:
            taken[expert] += 1
            kept[t].append(expert)
    return kept


def _loss(
    logits: list[list[Tensor]],
    scores: list[list[Tensor]],
    chosen: list[list[int]],
    number: int,
    count: int,
    words: Words,
) -> Tensor:
    loss = torch.zeros(())
    for e in range(count):
        mean = sum((row[e] / sum(row) for row in scores), torch.zeros(())) / number
        if words.k == 2:
            fraction = sum(row[0] == e for row in chosen if row) / number
        else:
            fraction = sum(e in row for row in chosen) / (number * words.k)
        loss = loss + count * mean * fraction
    squares = sum((torch.stack(row).exp().sum().log() ** 2 for row in logits), torch.zeros(())) / number
    return loss + words.z_weight * squares
