"""Tests of paged attention: equal to float64 attention over contiguous keys, with the same bits in any batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.base.errors import ModelError
from windlass.kernels.inference_path import list_inference_paths
from windlass.kernels.paged_attention import PagedKVCache, make_kv_cache, paged_attention, read_kv, write_kv

PATHS = list_inference_paths()
NATIVE = PATHS[:-1]
DTYPES = (torch.float32, torch.bfloat16, torch.int8)


@dataclass
class Sequences:
    """Cache with the tokens of some sequences in scattered blocks. All other memory is NaN (for the reference: 0)."""

    path: str
    contexts: list[int]
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0
    cache: PagedKVCache = field(init=False)
    table: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        counts = [-(-context // self.block_size) for context in self.contexts]
        size = (sum(counts) + 2, self.block_size, self.kv_heads, self.key_dim, self.value_dim, self.dtype)
        self.cache = make_kv_cache(*size, path=self.path)
        for tensor in self.cache.tensors:
            tensor.view(torch.uint8).fill_(255)  # NaN in every float format
        if self.path == "reference":  # it multiplies masked values by 0, and 0 x NaN is NaN
            for tensor in self.cache.tensors:
                tensor.zero_()
        blocks = iter(torch.randperm(sum(counts) + 2, generator=generator).tolist())
        self.table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        for sequence, context in enumerate(self.contexts):
            for i in range(counts[sequence]):
                self.table[sequence, i] = next(blocks)
            key = torch.randn(context, self.kv_heads, self.key_dim, generator=generator)
            value = torch.randn(context, self.kv_heads, self.value_dim, generator=generator)
            write_kv(self.cache, key, value, self.slots(sequence))

    def slots(self, sequence: int) -> torch.Tensor:
        position = torch.arange(self.contexts[sequence])
        return self.table[sequence, position // self.block_size].long() * self.block_size + position % self.block_size

    def attend(self, query: torch.Tensor, counts: list[int], **options: Any) -> torch.Tensor:
        start = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        lengths = torch.tensor(self.contexts, dtype=torch.int32)
        return paged_attention(query, self.cache, self.table, start, lengths, **options)


def exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of one sequence in float64, key by key: `[queries, heads, value_dim]`."""
    queries, heads, dim = query.shape
    group = heads // key.shape[1]
    out = torch.zeros(queries, heads, value.shape[-1], dtype=torch.float64)
    for i in range(queries):
        position = key.shape[0] - queries + i
        seen = [
            j
            for j in range(position + 1)
            if (sliding_window is None or position - j < sliding_window)
            and (chunk_size is None or position // chunk_size == j // chunk_size)
        ]
        for head in range(heads):
            scores = key[seen, head // group].double() @ query[i, head].double()
            scores *= dim**-0.5 if scaling is None else scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else math.exp(float(sinks[head])))
            out[i, head] = weights / total @ value[seen, head // group].double()
    return out


options_of_layers = st.fixed_dictionaries(
    {
        "sliding_window": st.one_of(st.none(), st.integers(1, 150)),
        "chunk_size": st.one_of(st.none(), st.integers(1, 150)),
        "softcap": st.one_of(st.none(), st.floats(0.5, 50.0)),
        "scaling": st.one_of(st.none(), st.floats(0.05, 0.5)),
    }
)
shapes = st.fixed_dictionaries(
    {
        "kv_heads": st.integers(1, 3),
        "key_dim": st.sampled_from([4, 8, 16, 20, 64]),
        "value_dim": st.sampled_from([4, 16, 24, 40, 64]),
        "block_size": st.sampled_from([16, 32, 48]),
        "dtype": st.sampled_from(DTYPES),
    }
)


@given(
    path=st.sampled_from(PATHS),
    requests=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 20)), min_size=1, max_size=4),
    group=st.integers(1, 7),
    has_sinks=st.booleans(),
    shape=shapes,
    options=options_of_layers,
    seed=st.integers(0, 99),
)
def test_attention_equals_float64_over_contiguous_keys(
    path: str,
    requests: list[tuple[int, int]],
    group: int,
    has_sinks: bool,
    shape: dict[str, Any],
    options: dict[str, Any],
    seed: int,
) -> None:
    contexts, counts = [context for context, _ in requests], [min(request) for request in requests]
    sequences = Sequences(path, contexts, seed=seed, **shape)
    heads = group * sequences.kv_heads
    generator = torch.Generator().manual_seed(seed + 1)
    query = torch.randn(sum(counts), heads, sequences.key_dim, generator=generator)
    sinks = torch.randn(heads, generator=generator) if has_sinks else None
    actual = sequences.attend(query, counts, sinks=sinks, **options)
    first = 0
    for sequence, count in enumerate(counts):
        key, value = read_kv(sequences.cache, sequences.slots(sequence))
        expected = exact(query[first : first + count], key, value, sinks=sinks, **options)
        assert torch.allclose(actual[first : first + count].double(), expected, atol=1e-5, rtol=0)
        first += count


@given(
    path=st.sampled_from(NATIVE or PATHS),
    context=st.integers(1, 400),
    queries=st.integers(1, 60),
    chunk=st.integers(1, 60),
    others=st.integers(0, 3),
    group=st.integers(1, 5),
    threads=st.integers(1, 3),
    shape=shapes,
    options=options_of_layers,
)
def test_queries_have_the_same_bits_in_every_batch_and_chunk(
    path: str,
    context: int,
    queries: int,
    chunk: int,
    others: int,
    group: int,
    threads: int,
    shape: dict[str, Any],
    options: dict[str, Any],
) -> None:
    if path == "reference":  # the reference does not guarantee equal bits
        return
    queries = min(queries, context)
    contexts = [50 + other for other in range(others)] + [context]
    sequences = Sequences(path, contexts, **shape)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(3 * others + queries, group * sequences.kv_heads, sequences.key_dim, generator=generator)
    together = sequences.attend(query, [3] * others + [queries], **options)[3 * others :]
    query = query[3 * others :]
    torch.set_num_threads(threads)
    try:
        for first in range(0, queries, chunk):
            part = query[first : first + chunk]
            alone = paged_attention(
                part,
                sequences.cache,
                sequences.table[others:],
                torch.tensor([0, len(part)], dtype=torch.int32),
                torch.tensor([context - queries + first + len(part)], dtype=torch.int32),
                **options,
            )
            assert torch.equal(alone, together[first : first + chunk])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("contexts", [[1500, 20, 1, 20, 20], [20, 20, 1500], [300] * 7, [1500]])
@pytest.mark.parametrize("path", NATIVE)
def test_threads_that_share_long_and_short_sequences_change_no_bit(path: str, contexts: list[int]) -> None:
    sequences = Sequences(path, contexts, kv_heads=3, key_dim=64, value_dim=64)
    query = torch.randn(len(contexts), 6, 64, generator=torch.Generator().manual_seed(1))
    for options in ({}, {"sliding_window": 130}):
        expected = sequences.attend(query, [1] * len(contexts), **options)
        for threads in (2, 3, 5, 70):
            torch.set_num_threads(threads)
            try:
                assert torch.equal(sequences.attend(query, [1] * len(contexts), **options), expected), threads
            finally:
                torch.set_num_threads(1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_read_as_written(path: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(40, 3, 20, generator=generator).to(dtype)
    value = torch.randn(40, 3, 12, generator=generator).to(dtype)
    slots = torch.randperm(64, generator=generator)[:40]
    for cache_dtype, limit in ((torch.float32, 0.0), (torch.bfloat16, 2**-8), (torch.int8, 0.5 / 127)):
        cache = make_kv_cache(4, 16, 3, 20, 12, cache_dtype, path=path)
        write_kv(cache, key, value, slots)
        for given_, result in zip((key, value), read_kv(cache, slots), strict=True):
            largest = given_.float().abs().amax(-1, keepdim=True)
            assert bool(((result - given_.float()).abs() <= limit * largest * 1.001).all())


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_written_caches_equal_those_of_the_reference(path: str, dtype: torch.dtype) -> None:
    key, value = torch.randn(40, 3, 20) * 5, torch.randn(40, 3, 12)
    key[3] = 0
    slots = torch.randperm(64)[:40]
    slots[7] = -1
    caches = [make_kv_cache(4, 16, 3, 20, 12, dtype, path=name) for name in (path, "reference")]
    for cache in caches:
        for tensor in cache.tensors:
            tensor.zero_()
        write_kv(cache, key, value, slots)
    assert all(torch.equal(*pair) for pair in zip(caches[0].tensors, caches[1].tensors, strict=True))
    assert caches[0].block_nbytes == sum(tensor.nbytes for tensor in caches[0].tensors) // 4


@pytest.mark.parametrize("path", PATHS)
def test_blocks_before_the_window_are_not_read(path: str) -> None:
    sequences = Sequences(path, [100])
    query = torch.randn(1, 4, 16)
    before = sequences.attend(query, [1], sliding_window=20)
    sequences.table[0, :5] = -1 if path != "reference" else 0
    assert torch.equal(sequences.attend(query, [1], sliding_window=20), before)


@pytest.mark.parametrize("path", PATHS)
def test_bf16_queries_round_once(path: str) -> None:
    sequences = Sequences(path, [70])
    query = torch.randn(5, 4, 16).bfloat16()
    result = sequences.attend(query, [5])
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, sequences.attend(query.float(), [5]).bfloat16())


@pytest.mark.parametrize("path", PATHS)
def test_large_scores_do_not_overflow(path: str) -> None:
    sequences = Sequences(path, [150])
    query = 1e4 * torch.randn(3, 4, 16)
    key, value = read_kv(sequences.cache, sequences.slots(0))
    actual = sequences.attend(query, [3])
    scores = torch.einsum("qhd,khd->qhk", query.double(), key.double().repeat_interleave(2, 1)) / 4
    scores += torch.ones(3, 150).tril(147).log()[:, None]
    expected = torch.einsum("qhk,khd->qhd", scores.softmax(-1), value.double().repeat_interleave(2, 1))
    assert torch.allclose(actual.double(), expected, atol=1e-2)


@pytest.mark.parametrize("path", [PATHS[0], "reference"])
def test_no_queries_give_an_empty_result(path: str) -> None:
    assert Sequences(path, [5]).attend(torch.zeros(0, 4, 16), [0]).shape == (0, 4, 16)


@pytest.mark.skipif(not NATIVE, reason="no native module was built")
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"table": torch.tensor([[0, 99]], dtype=torch.int32)}, "block 1 of sequence 0 is 99 in block_table"),
        ({"table": torch.tensor([[-1, 0]], dtype=torch.int32)}, "block 0 of sequence 0 is -1 in block_table"),
        ({"table": torch.tensor([[0]], dtype=torch.int32)}, "block_table is too narrow.* sequence 0"),
        ({"table": torch.tensor([[0, 1]])}, "block_table is torch.int64"),
        ({"start": torch.tensor([0, 3], dtype=torch.int32)}, "query_start"),
        ({"start": torch.tensor([1, 2], dtype=torch.int32)}, "query_start"),
        ({"start": torch.tensor([0, 1, 2], dtype=torch.int32)}, "3 elements of query_start"),
        ({"lengths": torch.tensor([1], dtype=torch.int32)}, "context_lengths is less"),
        ({"query": torch.zeros(2, 3, 16)}, r"queries of shape \(2, 3, 16\)"),
        ({"query": torch.zeros(2, 4, 16, dtype=torch.float64)}, "float64"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"softcap": -1.0}, "softcap is -1"),
        ({"sinks": torch.zeros(3)}, r"sinks of shape \(3,\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed: dict[str, Any], said: str) -> None:
    sequences = Sequences(NATIVE[0], [20])
    given_: dict[str, Any] = {
        "query": torch.zeros(2, 4, 16),
        "table": sequences.table,
        "start": torch.tensor([0, 2], dtype=torch.int32),
        "lengths": torch.tensor([20], dtype=torch.int32),
        **changed,
    }
    tensors = [given_.pop(name) for name in ("query", "table", "start", "lengths")]
    with pytest.raises(ModelError, match=said):
        paged_attention(tensors[0], sequences.cache, *tensors[1:], **given_)


@pytest.mark.parametrize("path", [PATHS[0], "reference"])
def test_writes_that_do_not_fit_are_refused(path: str) -> None:
    cache = make_kv_cache(2, 16, 2, 8, 4, path=path)
    key, value = torch.zeros(1, 2, 8), torch.zeros(1, 2, 4)
    with pytest.raises(ModelError, match="slot 32 .*beyond a cache of 2 blocks of 16"):
        write_kv(cache, key, value, torch.tensor([32]))
    with pytest.raises(ModelError, match=r"keys of shape \(1, 2, 4\)"):
        write_kv(cache, value, value, torch.tensor([0]))
    with pytest.raises(ModelError, match=r"values of shape \(1, 2, 8\)"):
        write_kv(cache, key, key, torch.tensor([0]))
    with pytest.raises(ModelError, match="block_size is 20"):
        make_kv_cache(2, 20, 2, 8)
    with pytest.raises(ModelError, match="torch.float16"):
        make_kv_cache(2, 16, 2, 8, dtype=torch.float16)


@pytest.mark.parametrize("path", PATHS)
def test_scales_are_float32_whatever_the_default_dtype_is(path: str) -> None:
    """Native code reads and writes the scales by their address."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        cache = make_kv_cache(4, 16, 3, 20, 12, torch.int8, path=path)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {scale.dtype for scale in cache.tensors[2:]} == {torch.float32}
