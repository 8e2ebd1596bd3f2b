"""Requests that clients send to a server, and FastGen's effective throughput under a service level.

A request meets the level if its first token arrives in time and every exponentially weighted mean (span 16, as
`pandas.Series.ewm(span=16).mean()`) of the gaps between its tokens is below a limit. Effective throughput is the rate
of the requests that meet the level (Holmes et al. 2024, DeepSpeed-FastGen).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

_SPAN = 16
_SPREAD = 0.3  # standard deviation of lengths, divided by their mean
_LONGEST = 3.3  # maximum length of a prompt, divided by the mean: FastGen's 4,000 / 1,200


@dataclass(frozen=True)
class LoadRequest:
    """Prompt as token ids, and the number of tokens of its answer."""

    prompt: list[int]
    answer: int


@dataclass
class RequestTimes:
    """Times of one request in seconds.

    Attributes:
        prompt: number of tokens of the prompt.
        sent: time at which the client sent the request.
        arrivals: time at which each token of the answer arrived.
        tokens: token ids of the answer.
    """

    prompt: int
    sent: float
    arrivals: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def first_token(self) -> float:
        """Return the time to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Return the times between tokens."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True)
class Level:
    """Limits of one service level.

    Attributes:
        token_seconds: largest time to the first token, in seconds for each token of the prompt.
        gap_seconds: largest weighted mean of gaps, in seconds.
    """

    token_seconds: float
    gap_seconds: float

    def is_met_by(self, times: RequestTimes) -> bool:
        """Return True if a request met the level."""
        if times.first_token > times.prompt * self.token_seconds:
            return False
        return all(mean < self.gap_seconds for mean in weighted_means(times.gaps))


def draw_requests(count: int, prompt_mean: int, answer_mean: int, vocabulary: int, seed: int) -> list[LoadRequest]:
    """Draw random prompts, and lengths of answers.

    Lengths are normally distributed, with a standard deviation of 30 % of the mean.
    """
    r = random.Random(seed)
    found = []
    for _ in range(count):
        length = min(max(round(r.gauss(prompt_mean, _SPREAD * prompt_mean)), 1), round(_LONGEST * prompt_mean))
        answer = max(round(r.gauss(answer_mean, _SPREAD * answer_mean)), 1)
        found.append(LoadRequest([r.randrange(3, vocabulary) for _ in range(length)], answer))
    return found


def weighted_means(values: Sequence[float]) -> list[float]:
    """Return the exponentially weighted mean of the values up to each value.

    The weight of a value is 1 - 2 / 17 times that of the value after it.
    """
    keep = 1 - 2 / (_SPAN + 1)
    found, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = total * keep + value, weight * keep + 1
        found.append(total / weight)
    return found


def percentile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that at least the fraction `part` of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[max(-int(-part * len(ordered) // 1) - 1, 0)] if ordered else 0.0
