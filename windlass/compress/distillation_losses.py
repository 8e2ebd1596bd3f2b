"""Terms of a distillation loss: divergences of distributions, and differences of hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from windlass.base.errors import ConfigError

_LEAST = 1e-12  # lower bound of probabilities before the logarithm
_LOWEST = -100.0  # logarithm of a probability that is about 0 in float32


@dataclass(frozen=True)
class TopProbabilities:
    """Largest probabilities of a teacher's distributions.

    Attributes:
        values: logarithms of the `k` largest probabilities, `[..., k]`.
        indices: classes of these probabilities, int64 `[..., k]`.
        temperature: temperature of the distributions.
        classes: number of all classes.
    """

    values: Tensor
    indices: Tensor
    temperature: float
    classes: int


def logits_divergence(
    student: Tensor,
    teacher: Tensor | TopProbabilities,
    *,
    temperature: float = 1.0,
    reverse: bool = False,
    counted: Tensor | None = None,
) -> Tensor:
    """Return the mean over positions of KL(teacher, student) at a temperature, times the squared temperature (Hinton et
    al. 2015, https://arxiv.org/abs/1503.02531).

    With `TopProbabilities` the other classes of a position count as one class, so that the divergence is at most that
    of the full distributions, and equal to it if `k` is the number of classes.

    Args:
        student, teacher: logits `[..., classes]`; computed in float32. Classes with the logit -inf in the first
            argument of KL add nothing.
        reverse: KL(student, teacher) instead.
        counted: positions that count, `[...]`; None: all. Values at other positions, NaN included, add nothing.

    Raises:
        ConfigError: `TopProbabilities` have another temperature.
    """
    if isinstance(teacher, TopProbabilities) and teacher.temperature != temperature:
        raise ConfigError(
            f"temperature is {temperature:g}, but the teacher's probabilities are of temperature "
            f"{teacher.temperature:g}; use one temperature for both"
        )
    left_out = None if counted is None else counted.to(student.device)[..., None] == 0
    own = F.log_softmax(_cleared(student.float() / temperature, left_out), -1)
    if isinstance(teacher, TopProbabilities):
        own, wanted = _with_rest(own, teacher, left_out)
    else:
        wanted = F.log_softmax(_cleared(teacher.float() / temperature, left_out), -1)
    first, second = (own, wanted) if reverse else (wanted, own)
    # 0 * log 0 is 0, not NaN
    difference = (first - second).masked_fill(first == float("-inf"), 0)
    return mean_of((first.exp() * difference).sum(-1), counted) * temperature**2


def attention_divergence(student: Tensor, teacher: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return the mean over heads and queries of KL(teacher, student) of attention maps (Wang et al. 2020, MiniLM,
    https://arxiv.org/abs/2002.10957).

    Args:
        student, teacher: probabilities `[batch, heads, queries, keys]`. Keys without probability add nothing.
        counted: queries that count, `[batch, queries]`.
    """
    wanted, own = teacher.float(), student.float()
    if counted is not None:
        left_out = counted.to(own.device)[:, None, :, None] == 0
        wanted, own = wanted.masked_fill(left_out, 0), own.masked_fill(left_out, 0)
    each = (wanted * (wanted.clamp(min=_LEAST).log() - own.clamp(min=_LEAST).log())).sum(-1).mean(1)
    return mean_of(each, counted)


def hidden_difference(student: Tensor, teacher: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return the mean squared difference of hidden states `[batch, ..., features]` over features and positions."""
    difference = student.float() - teacher.float()
    if counted is not None:
        difference = _cleared(difference, counted.to(difference.device)[..., None] == 0)
    return mean_of(difference.square().mean(-1), counted)


def mean_of(values: Tensor, counted: Tensor | None) -> Tensor:
    """Return the mean of the values that count, or of all if `counted` is None; 0 if no value counts."""
    if counted is None:
        return values.mean()
    weights = counted.to(values.dtype)
    return (values * weights).sum() / weights.sum().clamp(min=1)


def _cleared(fresh: Tensor, left_out: Tensor | None) -> Tensor:
    """Set values at positions that do not count to 0, in place: a model may compute NaN for padding, and a weight of 0
    would leave NaN in the sum and in the gradient."""
    return fresh if left_out is None else fresh.masked_fill_(left_out, 0)


def _with_rest(own: Tensor, teacher: TopProbabilities, left_out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return two tensors of log-probabilities, of the student and of the teacher: those of the teacher's most probable
    classes, then one entry for all other classes together, if there are any.
    """
    indices, wanted = teacher.indices.to(own.device), teacher.values.to(own.device, torch.float32)
    wanted = wanted if left_out is None else wanted.masked_fill(left_out, 0)
    largest = own.gather(-1, indices)
    if indices.shape[-1] >= teacher.classes:
        return largest, wanted
    # The bound keeps the gradient finite if all other classes have probability 0.
    rest = own.scatter(-1, indices, float("-inf")).clamp(min=_LOWEST).logsumexp(-1, keepdim=True)
    left = (1 - wanted.exp().sum(-1, keepdim=True)).clamp(min=_LEAST).log()
    return torch.cat([largest, rest], -1), torch.cat([wanted, left], -1)
