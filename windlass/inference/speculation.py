"""Drafts for speculative decoding: likely next tokens, which the model computes together with the last token.

A draft is accepted if it equals the token that is drawn at its position (see [Note: one draw a token]). That is
rejection sampling (Leviathan et al. 2023) with proposals of probability 1: the result has the distribution of the
model, and for one seed the tokens are those generated without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from windlass.inference.engine_options import SpeculativeOptions


class DraftProposer(Protocol):
    """Source of draft tokens for speculative decoding."""

    def propose(self, sequences: Sequence[tuple[int, list[int]]], count: int) -> list[list[int]]:
        """Return at most `count` draft tokens for each pair (id, tokens of prompt and answer) in `sequences`."""
        ...

    def release(self, sequence_id: int) -> None:
        """Free the state of a sequence."""
        ...

    def close(self) -> None:
        """Free all state."""
        ...


class NgramProposer:
    """Proposer that repeats the tokens after the latest earlier occurrence of the last tokens.

    This is prompt lookup (Saxena 2023).

    An index of each sequence maps the tokens of each n-gram to the position after its latest occurrence, and grows with
    the sequence.
    """

    def __init__(self, options: SpeculativeOptions) -> None:
        self._lengths = range(options.max_ngram, options.min_ngram - 1, -1)
        self._indexes: dict[int, dict[tuple[int, ...], int]] = {}
        self._indexed: dict[int, int] = {}

    def propose(self, sequences: Sequence[tuple[int, list[int]]], count: int) -> list[list[int]]:
        """Return at most `count` draft tokens for each pair (id, tokens of prompt and answer) in `sequences`."""
        return [self._propose(sequence_id, tokens, count) for sequence_id, tokens in sequences]

    def release(self, sequence_id: int) -> None:
        """Free the index of a sequence."""
        self._indexes.pop(sequence_id, None)
        self._indexed.pop(sequence_id, None)

    def close(self) -> None:
        """Free all indexes."""
        self._indexes.clear()
        self._indexed.clear()

    def _propose(self, sequence_id: int, tokens: list[int], count: int) -> list[int]:
        index = self._indexes.setdefault(sequence_id, {})
        # only n-grams that end before the last token, because the last token has no successor yet
        for end in range(self._indexed.get(sequence_id, 1), len(tokens)):
            for length in self._lengths:
                if length <= end:
                    index[tuple(tokens[end - length : end])] = end
        self._indexed[sequence_id] = len(tokens)
        for length in self._lengths:
            place = index.get(tuple(tokens[-length:])) if length <= len(tokens) else None
            if place is not None:
                return tokens[place : place + count]
        return []
