"""Holds documents out for evaluation, and turns their loss into bits per byte."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

IGNORE_INDEX = -100  # the label that cross entropy passes over


def choose_held_out(digests: np.ndarray, sizes: np.ndarray, target_bytes: int) -> np.ndarray:
    """Which documents to hold out, [documents] bool: about `target_bytes`, at most a tenth of the corpus, at least one.

    The choice hangs on the documents' hashes alone: not on their order, and a copy of a held-out document is held out
    too, so that the score never counts a text that was trained on.

    Args:
        digests: [documents] uint64, a hash of each document.
        sizes: [documents] int64, bytes of each document.
    """
    target = min(target_bytes, int(sizes.sum()) // 10)
    distinct, which = np.unique(digests, return_inverse=True)  # sorted: an order that the content alone decides
    weights = np.bincount(which, weights=sizes)  # a text that stands there twice weighs twice
    taken: list[int] = []
    total = 0.0
    for index, weight in enumerate(weights):
        if total >= target and taken:
            break
        # One huge document would be a narrow sample, and would take from training more than was asked.
        if total + weight <= 1.5 * target:
            taken.append(index)
            total += weight
    return np.isin(which, taken or [np.argmin(weights)])


@dataclass(frozen=True)
class HeldOutSet:
    """The held-out tokens as batches, and the accounting from nats to bits per byte.

    Every token but the first (an end token that starts the text) is predicted exactly once, the end of each document
    included; the bytes are those of the text.
    """

    tokens: np.ndarray  # [tokens]
    text_bytes: int
    seq_len: int

    def batches(self, micro_batch: int, rank: int, world_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """This rank's (inputs, labels), each [micro_batch, seq_len] int64; labels are already shifted.

        Every rank gets the same number of batches (the last may hold nothing but ignored labels), since a gather of
        sharded parameters needs all ranks.
        """
        rows = math.ceil((len(self.tokens) - 1) / self.seq_len)
        for first in range(0, rows, micro_batch * world_size):
            inputs = np.zeros((micro_batch, self.seq_len), dtype=np.int64)
            labels = np.full((micro_batch, self.seq_len), IGNORE_INDEX, dtype=np.int64)
            for slot in range(micro_batch):
                start = (first + rank * micro_batch + slot) * self.seq_len
                window = self.tokens[start : start + self.seq_len + 1].astype(np.int64)
                count = max(len(window) - 1, 0)
                inputs[slot, :count] = window[:count]
                labels[slot, :count] = window[1:]
            yield inputs, labels

    def bits_per_byte(self, nats: float) -> float:
        """From the summed negative log likelihood of all predicted tokens, in nats."""
        return nats / math.log(2) / self.text_bytes
