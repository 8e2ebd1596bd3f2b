"""Laws of [Note: sample order]: each epoch is complete, ranks are disjoint, resume is exact at any world size."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from windlass.data.resumable_samplers import EpochSampler, StreamSampler

worlds = st.integers(1, 7)
micros = st.integers(1, 5)


def drawn(length: int, seed: int, micro: int, world: int, steps: int, consumed: int = 0) -> list[int]:
    """Return the global stream of `steps` micro-batches of all ranks, in rank order."""
    samplers = [StreamSampler(length, seed, consumed) for _ in range(world)]
    return [
        int(sample)
        for _ in range(steps)
        for rank, sampler in enumerate(samplers)
        for sample in sampler.next_batch(micro, rank, world)
    ]


@settings(max_examples=40)
@given(length=st.integers(1, 60), seed=st.integers(0, 2**32), micro=micros, world=worlds)
def test_every_epoch_is_complete_and_ranks_are_disjoint_in_it(length: int, seed: int, micro: int, world: int) -> None:
    stream = drawn(length, seed, micro, world, steps=3 * length // (micro * world) + 1)
    for epoch in range(len(stream) // length):
        assert sorted(stream[epoch * length : (epoch + 1) * length]) == list(range(length))


@settings(max_examples=40)
@given(
    length=st.integers(1, 60),
    before=st.tuples(micros, worlds, st.integers(0, 20)),
    after=st.tuples(micros, worlds, st.integers(1, 20)),
)
def test_resume_at_any_world_size_continues_the_stream(
    length: int, before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    consumed = before[0] * before[1] * before[2]
    first = drawn(length, 5, *before)
    second = drawn(length, 5, *after, consumed=consumed)
    full = drawn(length, 5, micro=len(first) + len(second), world=1, steps=1)
    assert first + second == full


def test_stream_position_is_independent_of_the_rank() -> None:
    a, b = StreamSampler(10, 0), StreamSampler(10, 0)
    a.next_batch(2, 0, 3)
    b.next_batch(2, 2, 3)
    assert a.consumed == b.consumed == 6
    assert a.epoch == 0 and StreamSampler(10, 0, 10).epoch == 1


@settings(max_examples=40)
@given(length=st.integers(1, 50), world=worlds, epoch=st.integers(0, 5), shuffle=st.booleans(), drop=st.booleans())
def test_epoch_order_equals_torch(length: int, world: int, epoch: int, shuffle: bool, drop: bool) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(length))
    for rank in range(world):
        theirs = DistributedSampler(data, world, rank, shuffle=shuffle, seed=3, drop_last=drop)
        theirs.set_epoch(epoch)
        ours = EpochSampler(length, rank, world, shuffle=shuffle, seed=3, drop_last=drop)
        ours.seek(epoch)
        assert list(ours) == list(theirs)
        assert len(list(ours)) == len(ours)


@settings(max_examples=40)
@given(length=st.integers(1, 60), micro=micros, worlds=st.tuples(worlds, worlds), batches=st.integers(0, 10))
def test_rest_of_an_epoch_is_exact_at_another_world_size(
    length: int, micro: int, worlds: tuple[int, int], batches: int
) -> None:
    old, new = worlds
    consumed = min(micro * old * batches, length)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(9 + 2)).tolist()
    samplers = [EpochSampler(length, rank, new, seed=9) for rank in range(new)]
    for sampler in samplers:
        sampler.seek(2, consumed)
    rest = np.array([list(sampler) for sampler in samplers]).T.flatten().tolist()
    remaining = order[consumed:]
    assert rest[: len(remaining)] == remaining
    assert len(rest) - len(remaining) < new  # only the samples that fill the last round repeat
