"""Tests of loaders: they resume at the exact batch, refuse other data, and follow torch's rules."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from windlass.base.errors import DataError
from windlass.data.resumable_loaders import CyclingLoader, SequenceLoader, make_loader

TOKENS = np.arange(103, dtype=np.uint16)


def sequences(**options: Any) -> SequenceLoader:
    return SequenceLoader(TOKENS, seq_len=4, micro_batch=3, seed=1, **options)


def rows(batches: Any) -> list[list[int]]:
    return [row for batch in batches for row in batch["input_ids"].tolist()]


def test_sequence_epoch_contains_each_complete_block_once() -> None:
    first_epoch = rows(islice(sequences(), 9))[:25]
    assert sorted(first_epoch) == TOKENS[:100].reshape(25, 4).tolist()


def test_two_ranks_see_the_samples_of_one_rank() -> None:
    pair = [rows(islice(sequences(rank=rank, world_size=2), 4)) for rank in range(2)]
    alone = rows(islice(sequences(), 8))
    assert sorted(pair[0] + pair[1]) == sorted(alone)


def test_a_resumed_sequence_loader_repeats_the_batches_bit_for_bit() -> None:
    loader = sequences()
    list(islice(loader, 5))
    state = loader.state_dict()
    expected = rows(islice(loader, 6))
    fresh = sequences()
    fresh.load_state_dict(state)
    assert rows(islice(fresh, 6)) == expected
    assert fresh.epoch == pytest.approx(33 / 25)


def test_labels_are_the_inputs_as_int64() -> None:
    batch = next(sequences())
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert batch["input_ids"].dtype == torch.int64 and batch["input_ids"].shape == (3, 4)


@pytest.mark.parametrize("other", [{"digest": "b"}, {"seq_len": 5}])
def test_resume_on_other_data_is_refused_by_name(other: dict[str, Any]) -> None:
    state = sequences(digest="a").state_dict()
    arguments: dict[str, Any] = {"seq_len": 4, "digest": "a"} | other
    with pytest.raises(DataError, match=next(iter(other))):
        SequenceLoader(TOKENS, micro_batch=3, **arguments).load_state_dict(state)


def test_too_little_text_for_one_sequence_is_refused() -> None:
    with pytest.raises(DataError, match="--seq-len"):
        SequenceLoader(TOKENS, seq_len=104, micro_batch=1)


def dataset(length: int = 20) -> TensorDataset:
    return TensorDataset(torch.arange(length))


def ids(batches: Any) -> list[int]:
    return [int(value) for (batch,) in batches for value in batch]


def test_epochs_are_reshuffled_and_complete() -> None:
    loader = make_loader(dataset(), 3, 0, 1)
    first, second = ids(loader), ids(loader)
    assert sorted(first) == sorted(second) == list(range(20)) and first != second
    assert len(loader) == 7


def test_epoch_loader_resumes_inside_an_epoch() -> None:
    loader = make_loader(dataset(), 3, 1, 2, seed=4)
    iterator = iter(loader)
    list(islice(iterator, 2))
    state = loader.state_dict()
    fresh = make_loader(dataset(), 3, 1, 2, seed=4)
    fresh.load_state_dict(state)
    assert ids(fresh) == ids(iterator) != []
    assert ids(fresh) == ids(loader)  # both continue with the next epoch


@pytest.mark.parametrize("options", [{"seed": 6}, {"shuffle": False}])
def test_resumed_epoch_keeps_its_order(options: dict[str, Any]) -> None:
    loader = make_loader(dataset(), 2, 0, 1, seed=5)
    seen = ids(islice(loader, 4))
    other = make_loader(dataset(), 2, 0, 1, **options)
    other.load_state_dict(loader.state_dict())
    assert sorted(seen + ids(other)) == list(range(20))


def test_abandoned_iteration_restarts_its_epoch() -> None:
    loader = make_loader(dataset(), 3, 0, 1)
    begun = ids(islice(loader, 2))
    assert ids(loader)[:6] == begun


def test_set_epoch_to_the_current_epoch_keeps_the_position() -> None:
    loader = make_loader(dataset(), 5, 0, 1)
    loader.load_state_dict({"epoch": 3, "consumed": 15, "length": 20})
    loader.set_epoch(3)
    assert len(ids(loader)) == 5
    loader.set_epoch(3)
    assert len(ids(loader)) == 20


def test_a_dataset_of_another_length_cannot_be_resumed() -> None:
    state = make_loader(dataset(20), 3, 0, 1).state_dict()
    with pytest.raises(DataError, match="20 samples and has 21"):
        make_loader(dataset(21), 3, 0, 1).load_state_dict(state)


def test_drop_last_drops_the_partial_batch() -> None:
    loader = make_loader(dataset(), 3, 0, 1, drop_last=True)
    assert [len(batch) for (batch,) in loader] == [3] * 6


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_iterable_dataset_is_read_in_order() -> None:
    loader = make_loader(Stream(), 2, 1, 2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert loader.state_dict() == {}


def test_collate_fn_is_used() -> None:
    loader = make_loader(dataset(4), 2, 0, 1, collate_fn=len)
    assert list(loader) == [2, 2]


def test_repeating_loader_advances_epochs() -> None:
    loader, twin = make_loader(dataset(6), 2, 0, 1), make_loader(dataset(6), 2, 0, 1)
    assert ids(islice(CyclingLoader(loader), 9)) == ids(twin) + ids(twin) + ids(twin)


def test_repeating_an_empty_loader_is_an_error() -> None:
    with pytest.raises(DataError, match="no batch"):
        next(CyclingLoader([]))


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        make_loader(dataset(0), 2, 0, 1)
