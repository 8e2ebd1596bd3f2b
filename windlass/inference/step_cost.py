"""Prediction of the time of a step."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCost:
    """Model of the time of a forward: products with the weights, and attention to keys and values.

    The products take the longer of two times: to read the weights once, and to multiply by them. Measured `points`
    replace these two times if there are any, because products with few rows follow neither time. Beyond the last
    point, each token adds `token_seconds`.

    Attributes:
        fixed_seconds: seconds of a step outside the model.
        weight_seconds: seconds to read the weights once, which is the least that a forward takes.
        token_seconds: seconds to multiply all weights by one token.
        cached_token_seconds: seconds to read keys and values of one token.
        pair_seconds: seconds to multiply a token of a prompt by the keys and values of one token.
        points: measured pairs (tokens, seconds), in ascending order from 1 token; the seconds never fall. Empty: not
            measured.
        scale: moving average of the ratio of actual to predicted times, over steps with parts of prompts.
    """

    fixed_seconds: float = 0.0
    weight_seconds: float = 0.0
    token_seconds: float = 0.0
    cached_token_seconds: float = 0.0
    pair_seconds: float = 0.0
    points: tuple[tuple[int, float], ...] = ()
    scale: float = 1.0

    def step_seconds(self, tokens: int, cached_tokens: float, pairs: float = 0.0) -> float:
        """Return the predicted seconds of a step.

        Args:
            tokens: number of tokens of the batch.
            cached_tokens: number of cached tokens that each decode of the batch attends to, summed over the decodes.
            pairs: number of tokens that each prompt token of the batch attends to, summed over the prompt tokens.
        """
        attention = cached_tokens * self.cached_token_seconds + pairs * self.pair_seconds
        return self.scale * (self.fixed_seconds + self._product_seconds(tokens) + attention)

    def tokens_within(self, seconds: float, cached_tokens: float) -> int:
        """Return the largest number of tokens in a step of at most `seconds`; 0 if one token takes longer.

        The attention of decodes to `cached_tokens` keys is counted, that of prompt tokens is not.
        """
        left = seconds / self.scale - self.fixed_seconds - cached_tokens * self.cached_token_seconds
        if left <= 0 or left < self._product_seconds(1):
            return 0
        if self.points and left < self.points[-1][1]:
            place = max(bisect_left(self.points, left, key=lambda point: point[1]), 1)
            (low, shortest), (high, longest) = self.points[place - 1], self.points[place]
            return low + int((high - low) * (left - shortest) / (longest - shortest))
        if self.token_seconds <= 0:
            return 10**9
        last, longest = self.points[-1] if self.points else (0, 0.0)
        return int(min(last + (left - longest) / self.token_seconds, 1e9))

    def prefill_seconds(self, tokens: int) -> float:
        """Return the predicted seconds of a step that computes only `tokens` tokens of one prompt."""
        return self.step_seconds(tokens, 0, tokens * tokens / 2) if tokens else 0.0

    def prompt_work(self, tokens: int, computed: int) -> float:
        """Return the time to compute `tokens` tokens of a prompt after `computed` others, in units of the time of one
        token without attention.
        """
        pairs = tokens * (computed + tokens / 2)
        return tokens + (pairs * self.pair_seconds / self.token_seconds if self.token_seconds > 0 else 0.0)

    def _product_seconds(self, tokens: int) -> float:
        points = self.points
        if not points:
            return max(self.weight_seconds, tokens * self.token_seconds)
        if tokens >= points[-1][0]:
            return points[-1][1] + (tokens - points[-1][0]) * self.token_seconds
        place = bisect_left(points, tokens, key=lambda point: point[0])
        if place == 0 or points[place][0] == tokens:
            return points[place][1]
        (low, shortest), (high, longest) = points[place - 1], points[place]
        return shortest + (longest - shortest) * (tokens - low) / (high - low)
