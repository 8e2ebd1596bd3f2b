"""Attention over a paged KV cache: decode steps, chunks of prompts, and batches of both.

Native code computes on the CPU, `device_attention` on accelerators.

[Note: layout of the cache] Keys are `[blocks, kv_heads, key_dim, block_size]`, transposed inside a block: native
code sums the scores of 16 keys in one vector, to which it adds the 16 products of each query feature in turn, without a
horizontal sum. Values are `[blocks, kv_heads, block_size, value_dim]`, with `value_dim` padded to a multiple of 16; the
padding is undefined. In keys and in values, a block of one head is contiguous. Code outside of this file copies and
moves full blocks, and reads tokens by `read_kv`.

[Note: batch-invariant attention] Scores are sums in the order of the features, outputs are sums in the order of the
keys, in tiles that begin at fixed positions of the sequence. A query's result has the same bits whatever other queries
are in the call, for any split of its prompt into chunks, and for any number of threads. (The reference and accelerators
do not guarantee this.)
"""

from __future__ import annotations

import torch

from windlass.base.errors import ModelError
from windlass.kernels.device_attention import attend_on_device, write_on_device
from windlass.kernels.huge_pages import empty_on_huge_pages
from windlass.kernels.inference_path import InferencePath, get_inference_path, tensor_address
from windlass.kernels.reference.paged_attention import attend_to_pages
from windlass.kernels.reference.quantized_rows import quantize_rows

CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
BLOCK_MULTIPLE = 16
MOST_FEATURES = 1024  # largest head dimension that native code supports


class PagedKVCache:
    """Keys and values of one layer, in blocks of tokens; see [Note: layout of the cache]. Made by `make_kv_cache`.

    Attributes:
        keys, values: float32, bfloat16 or int8.
        key_scales, value_scales: float32 `[blocks, kv_heads, block_size]`, of int8 caches; else None.
        path: implementation that reads and writes the cache: an instruction set, or "reference".
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_scales: torch.Tensor | None,
        value_scales: torch.Tensor | None,
        value_dim: int,
        path: InferencePath,
    ) -> None:
        self.keys, self.values = keys, values
        self.key_scales, self.value_scales = key_scales, value_scales
        self.num_blocks, self.kv_heads, self.key_dim, self.block_size = keys.shape
        self.value_dim = value_dim
        native = (
            path.module is not None
            and keys.device.type == "cpu"
            and max(self.key_dim, value_dim) <= MOST_FEATURES
            and keys.numel() > 0
        )
        self._path = path if native else get_inference_path("reference")
        self._handle: object = None
        if self._path.module is not None:
            self._handle = self._path.module.cache(
                CACHE_DTYPES.index(keys.dtype),
                keys.data_ptr(),
                values.data_ptr(),
                0 if key_scales is None else key_scales.data_ptr(),
                0 if value_scales is None else value_scales.data_ptr(),
                *keys.shape[:3],
                value_dim,
                self.block_size,
            )

    @property
    def path(self) -> str:
        return self._path.name

    @property
    def handle(self) -> object:
        """The native object of the cache; None without native code."""
        return self._handle

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the cache, each with the blocks as its first dimension: copy or move these by block."""
        scales = (self.key_scales, self.value_scales)
        return (self.keys, self.values, *(scale for scale in scales if scale is not None))

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block."""
        return sum(tensor[0].nbytes for tensor in self.tensors)


def make_kv_cache(
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    path: str | None = None,
    device: torch.device | str = "cpu",
) -> PagedKVCache:
    """Allocate the cache of one layer. Its values are undefined until `write_kv`, except on an accelerator, where they
    are 0.

    Args:
        block_size: tokens of a block, a multiple of 16.
        value_dim: features of a value; by default `key_dim`.
        dtype: float32, bfloat16, or int8 with one float32 scale for each token and head.
        path: one of `list_inference_paths()` in place of the active one.
        device: device of the cache.

    Raises:
        ModelError: the block size or the dtype is not supported.
        ConfigError: the path is not available.
    """
    if block_size <= 0 or block_size % BLOCK_MULTIPLE:
        raise ModelError(f"block_size is {block_size}; use a multiple of {BLOCK_MULTIPLE}")
    if dtype not in CACHE_DTYPES:
        raise ModelError(f"a KV cache cannot be {dtype}; use torch.float32, bfloat16 or int8")
    value_dim = key_dim if value_dim is None else value_dim

    on_cpu = torch.device(device).type == "cpu"

    def make(shape: tuple[int, ...]) -> torch.Tensor:
        return empty_on_huge_pages(shape, dtype) if on_cpu else torch.zeros(shape, dtype=dtype, device=device)

    def make_scales() -> torch.Tensor | None:
        if dtype != torch.int8:
            return None
        return torch.zeros(num_blocks, kv_heads, block_size, dtype=torch.float32, device=device)

    return PagedKVCache(
        make((num_blocks, kv_heads, key_dim, block_size)),
        make((num_blocks, kv_heads, block_size, -(-value_dim // 16) * 16)),
        make_scales(),
        make_scales(),
        value_dim,
        get_inference_path(path),
    )


def write_kv(cache: PagedKVCache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Store the keys and values of tokens.

    int8 caches round to nearest, ties to even, with `scale = max |row| / 127` for each token and head.

    Args:
        key: `[tokens, kv_heads, key_dim]`, float32 or bfloat16.
        value: `[tokens, kv_heads, value_dim]` of the same dtype.
        slots: int64 `[tokens]`; `block * block_size + offset`. A negative slot is skipped on the CPU. On accelerators
            slots must be in the cache, which is not checked.

    Raises:
        ModelError: shapes do not match, native code does not support a dtype, or, on the CPU, a slot is outside the
            cache.
    """
    tokens = slots.shape[0]
    if tuple(key.shape) != (tokens, cache.kv_heads, cache.key_dim):
        raise ModelError(
            f"keys of shape {tuple(key.shape)} do not fit {tokens} slots of a cache of {cache.kv_heads} heads of "
            f"{cache.key_dim} features; give {(tokens, cache.kv_heads, cache.key_dim)}"
        )
    if tuple(value.shape) != (tokens, cache.kv_heads, cache.value_dim):
        raise ModelError(
            f"values of shape {tuple(value.shape)} do not fit {tokens} slots of a cache of {cache.kv_heads} heads of "
            f"{cache.value_dim} features; give {(tokens, cache.kv_heads, cache.value_dim)}"
        )
    if tokens == 0:
        return
    if cache.keys.device.type != "cpu":
        write_on_device(cache, key, value, slots)
        return
    if cache._path.module is None:
        _write_reference(cache, key, value, slots)
        return
    if key.dtype != value.dtype or key.dtype not in (torch.float32, torch.bfloat16):
        raise ModelError(f"keys are {key.dtype} and values {value.dtype}; give both as torch.float32 or bfloat16")
    key, value = key.contiguous(), value.contiguous()
    slots = slots.to(torch.int64).contiguous()
    try:
        cache._path.module.write_cache(
            cache._path.number,
            cache._handle,
            tensor_address("key", key),
            tensor_address("value", value),
            key.dtype == torch.bfloat16,
            tensor_address("tensor of slots", slots),
            tokens,
            torch.get_num_threads(),
        )
    except ValueError as error:  # native code checks all arguments before it writes
        raise ModelError(f"nothing was written to the KV cache: {error}") from error


def _write_reference(cache: PagedKVCache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    if int(slots.max()) >= cache.num_blocks * cache.block_size:
        raise ModelError(
            f"nothing was written to the KV cache: slot {int(slots.max())} is beyond a cache of {cache.num_blocks} "
            f"blocks of {cache.block_size} tokens"
        )
    chosen = (slots >= 0).nonzero()[:, 0]
    block, offset = slots[chosen] // cache.block_size, slots[chosen] % cache.block_size
    key, value = key[chosen], value[chosen]
    if cache.key_scales is not None and cache.value_scales is not None:
        key, key_scale = quantize_rows(key)
        value, value_scale = quantize_rows(value)
        cache.key_scales[block, :, offset] = key_scale
        cache.value_scales[block, :, offset] = value_scale
    cache.keys[block, :, :, offset] = key.to(cache.dtype)
    cache.values[block, :, offset, : cache.value_dim] = value.to(cache.dtype)


def read_kv(cache: PagedKVCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of the tokens at `slots` (int64 `[tokens]`), in float32, in `write_kv`'s shapes."""
    block, offset = slots // cache.block_size, slots % cache.block_size
    key, value = cache.keys[block, :, :, offset].float(), cache.values[block, :, offset, : cache.value_dim].float()
    if cache.key_scales is not None and cache.value_scales is not None:
        key = key * cache.key_scales[block, :, offset][..., None]
        value = value * cache.value_scales[block, :, offset][..., None]
    return key, value


def paged_attention(
    query: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lengths: torch.Tensor,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention of the newest tokens of several sequences over their cached keys and values.

    Query `i` of a sequence with `n` queries is at position `context_length - n + i`, and attends to the keys at its own
    and earlier positions. Its own key and value must be in the cache. The scores are in float32 whatever the dtypes.

    Args:
        query: `[tokens, heads, key_dim]`, float32 or bfloat16, on accelerators also float16; `heads` is a multiple of
            the cache's `kv_heads`. The queries of a sequence are consecutive.
        block_table: int32 `[sequences, max_blocks]`; the blocks of each sequence in order.
        query_start: int32 `[sequences + 1]`; sequence `s` has the queries `[query_start[s], query_start[s + 1])`.
        context_lengths: int32 `[sequences]`; tokens of each sequence in the cache, the queries' own included.
        scaling: factor of the scores; by default `key_dim ** -0.5`.
        sliding_window: number of positions that a query attends to, its own included; None: no limit.
        chunk_size: positions in a chunk; a query attends only to its own chunk, as in Llama 4. None: no chunks.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2); None: they are unchanged.
        sinks: `[heads]`; one more logit of each head in the softmax, without a value (GPT-OSS's `s_aux`).

    Returns:
        `[tokens, heads, value_dim]` in the dtype of `query`.

    Raises:
        ModelError: shapes or dtypes do not match, or native code is given lengths or blocks that do not fit the cache.
            The message names the argument.
    """
    _check_attention(
        query, cache, block_table, query_start, context_lengths, sliding_window, chunk_size, softcap, sinks
    )
    scaling = cache.key_dim**-0.5 if scaling is None else scaling
    if query.shape[0] == 0:
        return query.new_empty(0, query.shape[1], cache.value_dim)
    if cache.keys.device.type != "cpu":
        return attend_on_device(
            query,
            cache,
            block_table,
            query_start,
            context_lengths,
            scaling=scaling,
            sliding_window=sliding_window,
            chunk_size=chunk_size,
            softcap=softcap,
            sinks=sinks,
        )
    if cache._path.module is None:
        return attend_to_pages(
            query.float(),
            *_unpacked_cache(cache),
            block_table,
            query_start,
            context_lengths,
            scaling=scaling,
            sliding_window=sliding_window,
            chunk_size=chunk_size,
            softcap=softcap,
            sinks=sinks,
        ).to(query.dtype)
    query = query.contiguous()
    block_table, query_start = block_table.contiguous(), query_start.contiguous()
    context_lengths = context_lengths.contiguous()
    sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
    out = torch.empty(query.shape[0], query.shape[1], cache.value_dim, dtype=query.dtype)
    try:
        cache._path.module.attention(
            cache._path.number,
            cache._handle,
            tensor_address("query", query),
            out.data_ptr(),
            query.dtype == torch.bfloat16,
            query.shape[0],
            query.shape[1],
            tensor_address("block_table", block_table),
            block_table.shape[1],
            tensor_address("query_start", query_start),
            tensor_address("context_lengths", context_lengths),
            context_lengths.shape[0],
            scaling,
            softcap or 0.0,
            sliding_window or 0,
            chunk_size or 0,
            0 if sinks is None else tensor_address("sinks", sinks),
            torch.get_num_threads(),
        )
    except ValueError as error:  # native code checks all arguments before it reads
        raise ModelError(f"paged attention cannot run: {error}") from error
    return out


def _unpacked_cache(cache: PagedKVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values in float32, `[blocks, kv_heads, block_size, features]`."""
    keys, values = cache.keys.transpose(2, 3).float(), cache.values[..., : cache.value_dim].float()
    if cache.key_scales is not None and cache.value_scales is not None:
        keys, values = keys * cache.key_scales[..., None], values * cache.value_scales[..., None]
    return keys, values


def _check_attention(
    query: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lengths: torch.Tensor,
    sliding_window: int | None,
    chunk_size: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    if query.dim() != 3 or query.shape[2] != cache.key_dim or query.shape[1] % cache.kv_heads:
        raise ModelError(
            f"queries of shape {tuple(query.shape)} do not fit a cache of {cache.kv_heads} heads of {cache.key_dim} "
            "features; give [tokens, heads, features] with a multiple of those heads"
        )
    sequences = context_lengths.shape[0]
    if query_start.shape[0] != sequences + 1 or block_table.shape[0] != sequences:
        raise ModelError(
            f"{sequences} context_lengths came with {query_start.shape[0]} elements of query_start and "
            f"{block_table.shape[0]} rows of block_table; give {sequences + 1} and {sequences}"
        )
    for name, table in (
        ("block_table", block_table),
        ("query_start", query_start),
        ("context_lengths", context_lengths),
    ):
        if table.dtype != torch.int32:
            raise ModelError(f"{name} is {table.dtype}; give torch.int32")
    half = query.dtype == torch.float16 and query.device.type != "cpu"
    if query.dtype not in (torch.float32, torch.bfloat16) and not half:
        raise ModelError(f"queries are {query.dtype}; convert them to torch.float32 or bfloat16")
    if softcap is not None and softcap <= 0:
        raise ModelError(f"softcap is {softcap}; give a positive number, or None")
    for name, limit in (("sliding_window", sliding_window), ("chunk_size", chunk_size)):
        if limit is not None and limit <= 0:
            raise ModelError(f"{name} is {limit}; give a positive number of tokens, or None")
    if sinks is not None and tuple(sinks.shape) != (query.shape[1],):
        raise ModelError(f"sinks of shape {tuple(sinks.shape)} do not fit {query.shape[1]} heads; give one a head")
