"""Prediction of the time of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCost:
    """Linear model of a forward: reading weights or multiplying, whichever takes longer, and reading the KV cache.

    Attributes:
        fixed_seconds: of a step beside the model.
        weight_seconds: to read the weights once, which is the least that a forward takes.
        token_seconds: to multiply all weights by one token.
        cached_token_seconds: to read keys and values of one token.
    """

    fixed_seconds: float = 0.0
    weight_seconds: float = 0.0
    token_seconds: float = 0.0
    cached_token_seconds: float = 0.0

    def step_seconds(self, tokens: int, cached_tokens: int) -> float:
        """Return the predicted time of a step.

        Args:
            tokens: of the batch.
            cached_tokens: sum over the sequences of the batch of the cached tokens that each attends to.
        """
        compute = max(self.weight_seconds, tokens * self.token_seconds)
        return self.fixed_seconds + compute + cached_tokens * self.cached_token_seconds

    def tokens_within(self, seconds: float, cached_tokens: int) -> int:
        """Return the largest number of tokens whose step takes at most `seconds`; 0 if even one takes longer."""
        left = seconds - self.fixed_seconds - cached_tokens * self.cached_token_seconds
        if left < self.weight_seconds or left <= 0:
            return 0
        return int(min(left / self.token_seconds, 1e9)) if self.token_seconds > 0 else 10**9

    def prefill_seconds(self, tokens: int) -> float:
        """Return the predicted time of computing `tokens` tokens of one prompt alone."""
        return self.step_seconds(tokens, 0) if tokens else 0.0
