"""Calibration text of a compression: tokens for rounding, and held-out tokens on which the loss is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from windlass.base.errors import DataError
from windlass.data.corpus_sources import find_sources
from windlass.data.held_out import IGNORE_INDEX, HeldOutSet, choose_held_out
from windlass.data.pack_corpus import Corpus
from windlass.data.tokenizer import load_tokenizer

_LEAST_LENGTH = 8
_ROWS_AT_ONCE = 4  # sequences in one forward
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class CalibrationText:
    """Tokens of a corpus.

    Attributes:
        batches: token ids `[rows, length]`, all of one shape, of documents that are not held out.
        held_out: held-out documents, none of which is in a batch.
    """

    batches: list[torch.Tensor]
    held_out: HeldOutSet

    @property
    def tokens(self) -> int:
        """Number of tokens of all batches."""
        return sum(batch.numel() for batch in self.batches)


def read_calibration_text(
    specs: Sequence[str],
    model: Path,
    *,
    sequences: int = 128,
    length: int = 512,
    eval_bytes: int = 1 << 16,
    text_field: str = "text",
) -> CalibrationText:
    """Read the text of some sources with the tokenizer of a model's directory.

    Args:
        specs: sources for `find_sources`.
        sequences, length: maximum number and length of the calibration's sequences; a short text gives fewer and
            shorter ones.
        eval_bytes: approximate bytes of held-out text, or a tenth of the corpus if that is less; at least one document.
        text_field: name of the field with the text, in sources of records.

    Raises:
        DataError: there is too little text, or the directory has no tokenizer.
    """
    tokenizer = load_tokenizer(model)
    corpus = Corpus(find_sources(specs, text_field=text_field), text_field)
    if len(corpus.sizes) < 2:
        raise DataError(f"the text {', '.join(specs)} is empty or a single line; give at least some lines")
    held = choose_held_out(corpus.digests, corpus.sizes, eval_bytes)
    order = np.argsort(corpus.digests, kind="stable")
    order = order[~held[order]]
    # 16 bytes for each token are enough, since tokens are shorter on average; the rest is not tokenized
    before = np.cumsum(corpus.sizes[order]) - corpus.sizes[order]
    chosen = np.zeros(len(held), dtype=bool)
    chosen[order[before < 16 * sequences * length]] = True
    evaluation, calibration, eval_total = [np.array([tokenizer.eos])], [np.array([tokenizer.eos])], 0
    for text, is_held, is_chosen, size in zip(corpus, held, chosen, corpus.sizes, strict=True):
        if is_held or is_chosen:
            (evaluation if is_held else calibration).append(np.append(tokenizer.encode([text])[0], tokenizer.eos))
            eval_total += int(size) if is_held else 0
    tokens = np.concatenate(calibration)
    length = min(length, len(tokens))
    if length < _LEAST_LENGTH:
        raise DataError(f"the text {', '.join(specs)} has {len(tokens)} tokens; give at least {_LEAST_LENGTH}")
    rows = min(sequences, len(tokens) // length)
    at_once = next(size for size in range(_ROWS_AT_ONCE, 0, -1) if rows % size == 0)
    ids = torch.from_numpy(tokens[: rows * length].astype(np.int64)).view(rows, length)
    held_out = HeldOutSet(np.concatenate(evaluation), eval_total, length)
    return CalibrationText([batch.clone() for batch in ids.split(at_once)], held_out)


def longest_sequence(config: dict[str, Any]) -> int | None:
    """Return the maximum number of tokens of a sequence in a model's configuration; None: it has no such key."""
    nested = config.get("text_config")
    for source in (config, nested if isinstance(nested, dict) else {}):
        for key in _LENGTH_KEYS:
            if isinstance(source.get(key), int) and source[key] > 0:
                return int(source[key])
    return None


def bits_per_byte(model: nn.Module, held_out: HeldOutSet) -> float:
    """Return the loss of a causal language model on held-out text, in bits per byte."""
    nats = 0.0
    with torch.no_grad():
        for inputs, labels in held_out.batches(_ROWS_AT_ONCE, 0, 1):
            logits = model(torch.from_numpy(inputs), use_cache=False).logits.float()
            target = torch.from_numpy(labels).flatten()
            nats += float(F.cross_entropy(logits.flatten(0, 1), target, ignore_index=IGNORE_INDEX, reduction="sum"))
    return held_out.bits_per_byte(nats)
