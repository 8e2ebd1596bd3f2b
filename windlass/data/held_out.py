"""Selection of held-out documents, and conversion of their loss to bits per byte."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

IGNORE_INDEX = -100  # label that cross entropy ignores


def choose_held_out(digests: np.ndarray, sizes: np.ndarray, target_bytes: int) -> np.ndarray:
    """Choose the held-out documents: at least one, and about `target_bytes` or a tenth of the corpus if that is less.

    The choice depends only on the documents' hashes and sizes, not on their order. Copies of a held-out document
    are held out too, so the score never includes a text from the training set.

    Args:
        digests: `[documents]` uint64, a hash of each document.
        sizes: `[documents]` int64, bytes of each document.

    Returns:
        `[documents]` bool, True for held-out documents.
    """
    target = min(target_bytes, int(sizes.sum()) // 10)
    distinct, which = np.unique(digests, return_inverse=True)  # sorted, so that the order depends on the content alone
    weights = np.bincount(which, weights=sizes)  # bytes of all copies of a text together
    taken: list[int] = []
    total = 0.0
    for index, weight in enumerate(weights):
        if total >= target and taken:
            break
        # A single huge document would be a narrow sample, and would remove too much from training.
        if total + weight <= 1.5 * target:
            taken.append(index)
            total += weight
    return np.isin(which, taken or [np.argmin(weights)])


@dataclass(frozen=True)
class HeldOutSet:
    """Held-out tokens in batches, and the conversion of nats to bits per byte.

    Every token except the first (an end token before the text) is predicted exactly once, including the end token of
    each document. `text_bytes` counts the UTF-8 bytes of the documents, without end tokens.
    """

    tokens: np.ndarray  # [tokens]
    text_bytes: int
    seq_len: int

    def batches(self, micro_batch: int, rank: int, world_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield this rank's (inputs, labels), each `[micro_batch, seq_len]` int64. Labels are already shifted.

        Every rank yields the same number of batches, since the all-gathers of sharded parameters need all ranks. On
        some ranks the last batch may have only ignored labels.
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
        """Convert the summed negative log likelihood of all predicted tokens from nats to bits per byte."""
        return nats / math.log(2) / self.text_bytes
