"""Tests of held-out text: chosen by content, predicted exactly once, scored in bits per byte."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from windlass.data.held_out import IGNORE_INDEX, HeldOutSet, choose_held_out

documents = st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 500)), min_size=2, max_size=80)


@given(documents=documents, target=st.integers(1, 2000), order=st.randoms())
def test_held_out_choice_depends_on_content_only(documents: list[tuple[int, int]], target: int, order: object) -> None:
    unique = list({digest: (digest, size) for digest, size in documents}.values())
    chosen = split(unique, target)
    order.shuffle(unique)  # type: ignore[attr-defined]
    assert split(unique, target) == chosen


def split(documents: list[tuple[int, int]], target: int) -> set[int]:
    digests = np.array([digest for digest, _ in documents], dtype=np.uint64)
    held = choose_held_out(digests, np.array([size for _, size in documents]), target)
    return set(digests[held].tolist())


@given(documents=documents, target=st.integers(1, 2000))
def test_held_out_share_is_near_the_target(documents: list[tuple[int, int]], target: int) -> None:
    unique = dict(documents)
    sizes = np.array(list(unique.values()))
    held = choose_held_out(np.array(list(unique), dtype=np.uint64), sizes, target)
    assert held.any()
    bound = 1.5 * min(target, sizes.sum() // 10)
    assert sizes[held].sum() <= bound or held.sum() == 1


def test_copies_of_a_document_stay_on_one_side() -> None:
    digests = np.array([5, 1, 9, 1, 7, 1] * 10, dtype=np.uint64)
    held = choose_held_out(digests, np.full(60, 10), 30)
    assert len({bool(side) for side in held[digests == 1]}) == 1 and held.any() and not held.all()


@given(
    count=st.integers(2, 200),
    seq_len=st.integers(1, 17),
    micro=st.integers(1, 4),
    world=st.integers(1, 4),
)
def test_every_token_but_the_first_is_scored_once(count: int, seq_len: int, micro: int, world: int) -> None:
    tokens = np.arange(1000, 1000 + count, dtype=np.uint16)
    held_out = HeldOutSet(tokens, 1, seq_len)
    per_rank = [list(held_out.batches(micro, rank, world)) for rank in range(world)]
    assert len({len(batches) for batches in per_rank}) == 1
    predicted: list[int] = []
    for inputs, labels in (batch for batches in per_rank for batch in batches):
        assert inputs.shape == labels.shape == (micro, seq_len)
        counted = labels != IGNORE_INDEX
        assert (labels[counted] == inputs[counted] + 1).all()
        predicted += labels[counted].tolist()
    assert sorted(predicted) == tokens[1:].tolist()


def test_uniform_model_scores_log_of_the_vocabulary() -> None:
    vocab, text = 16, HeldOutSet(np.arange(11) % 16, text_bytes=20, seq_len=4)
    nats = 0.0
    for _, labels in text.batches(2, 0, 1):
        logits = torch.zeros(labels.size, vocab)
        targets = torch.from_numpy(labels).flatten()
        nats += F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE_INDEX).item()
    assert text.bits_per_byte(nats) == pytest.approx(10 * math.log2(vocab) / 20)
